// Merges the partial results of a query tile that stream-K has split by keys (attn/schedule/stream_k.cuh). An item is
// the part of such a tile that one block, or one cluster, has computed.
//
// Each warp works for itself. In every item of the tile one warp owns the same 16 rows. Each of these warps takes a
// number before its last product. All but the one with the last number write their partial results to global memory,
// and report that they are there. The last one waits for these reports, which are about to come, and merges all partial
// results in the order of keys. So the bits of the result do not depend on which warp is last. Its own partial result
// stays in registers, unless there are many items: it then takes those registers for more loads at a time.
//
// A report comes when the writes have arrived, some microseconds later. If the piece goes on in another query tile, the
// warp begins that item first, and reports beside its first products. It then reports even if it had the last number,
// so that it need not remember.
#pragma once

#include "attn/exponent.cuh"
#include "attn/score_rule.cuh"
#include "sm90/forward_store.cuh"
#include "sm90/forward_work.cuh"

namespace forward {

struct alignas(16) Quad {
  float x[4];
};
// The partial result of a warp's 16 rows: each lane's part of the output, and the running maxima and sums of the lane's
// two rows. Lanes lie side by side.
struct Partial {
  Quad out[2 * kOutBlocks][32];
  Quad softmax[32];
};
static_assert(C::kElements == 8 && C::kSlots == 2, "two quads of each block");
constexpr int kConsumerWarps = kCluster * kConsumers * 4;  // consumer warps that work on an item
// A word for each warp counts the items of a query tile: those with a number, and, times kReported, those reported.
constexpr unsigned kReported = 1u << 16;
// The most items of a query tile that has few. With three consumers or more any number counts as few: a kernel with
// both ways of merging took 1.5 % longer there, in whole tiles too.
constexpr int kFewItems = 4;
// Whether a consumer has registers for the output, for so many quads, and for all else.
constexpr bool has_registers(int quads) { return kConsumerRegisters >= 8 * kOutBlocks + 4 * quads + 20; }

// Writes a lane's part of a partial result.
DEVICE void write_partial(Partial& partial, const C (&o)[1][kOutBlocks], const Softmax& softmax, int lane) {
  UNROLL for (int d = 0; d < kOutBlocks; d++) {
    const auto& x = o[0][d].x;
    partial.out[2 * d][lane] = {x[0], x[1], x[2], x[3]};
    partial.out[2 * d + 1][lane] = {x[4], x[5], x[6], x[7]};
  }
  const auto &running_max = softmax.running_max[0], &sum = softmax.sum[0];
  partial.softmax[lane] = {running_max[0], running_max[1], sum[0], sum[1]};
}

// The sum of partial results: kQuads quads of the output, and the running maxima and sums of the lane's rows.
template <int kQuads>
struct Merged {
  Quad out[kQuads] = {};
  float running_max[C::kSlots], sum[C::kSlots];

  DEVICE Merged() {
    UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
      running_max[slot] = -target::infinity();
      sum[slot] = 0.0f;
    }
  }
  // Adds a partial result. rows: its running maxima and sums.
  DEVICE void add(const Quad (&x)[kQuads], const Quad& rows) {
    float before[C::kSlots], weight[C::kSlots];
    UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
      const float last = running_max[slot];
      running_max[slot] = fmaxf(last, rows.x[slot]);
      const float shift = running_max[slot] == -target::infinity() ? 0.0f : running_max[slot];
      before[slot] = Exponent::power(last - shift);
      weight[slot] = Exponent::power(rows.x[slot] - shift);
      sum[slot] = sum[slot] * before[slot] + rows.x[2 + slot] * weight[slot];
    }
    UNROLL for (int q = 0; q < kQuads; q++) {
      UNROLL for (int e = 0; e < 4; e++) {
        const int slot = C::slot(q % 2 * 4 + e);
        out[q].x[e] = out[q].x[e] * before[slot] + x[q].x[e] * weight[slot];
      }
    }
  }
};

// Merges all partial results of a query tile in the order of keys into o and softmax. The result is like that of one
// item: not divided by the sums. partials: those of the items, kConsumerWarps apart. kOwn: that of item `own` is in o
// and softmax, and not in memory. kQuads quads of the output are merged at a time, and kItems items are loaded at once.
template <bool kOwn, int kQuads, int kItems>
DEVICE void merge(C (&o)[1][kOutBlocks], Softmax& softmax, const Partial* partials, int items, int own, int lane) {
  constexpr int kAll = 2 * kOutBlocks;
  auto &running_max = softmax.running_max[0], &sum = softmax.sum[0];
  const Quad own_rows = {running_max[0], running_max[1], sum[0], sum[1]};
  UNROLL for (int first = 0; first < kAll; first += kQuads) {
    Merged<kQuads> merged;
    const auto add_stored = [&](int begin, int end) {
#pragma unroll 1
      for (int item = begin; item < end; item += kItems) {
        Quad rows[kItems], out[kItems][kQuads] = {};
        UNROLL for (int n = 0; n < kItems; n++) {
          // Past the last item the last one is read again, with a weight of 0.
          const bool real = item + n < end;
          const Partial& partial = partials[(real ? item + n : end - 1) * kConsumerWarps];
          rows[n] = partial.softmax[lane];
          if (!real) rows[n] = {-target::infinity(), -target::infinity(), 0.0f, 0.0f};
          UNROLL for (int q = 0; q < kQuads && first + q < kAll; q++) out[n][q] = partial.out[first + q][lane];
        }
        UNROLL for (int n = 0; n < kItems; n++) merged.add(out[n], rows[n]);
      }
    };
    if constexpr (kOwn) {
      add_stored(0, own);
      Quad out[kQuads] = {};
      UNROLL for (int q = 0; q < kQuads && first + q < kAll; q++) {
        UNROLL for (int e = 0; e < 4; e++) out[q].x[e] = o[0][(first + q) / 2].x[q % 2 * 4 + e];
      }
      merged.add(out, own_rows);
      add_stored(own + 1, items);
    } else {
      add_stored(0, items);
    }
    UNROLL for (int q = 0; q < kQuads && first + q < kAll; q++) {
      UNROLL for (int e = 0; e < 4; e++) o[0][(first + q) / 2].x[q % 2 * 4 + e] = merged.out[q].x[e];
    }
    if (first + kQuads >= kAll) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        running_max[slot] = merged.running_max[slot];
        sum[slot] = merged.sum[slot];
      }
    }
  }
}

DEVICE bool is_whole(const WorkTile&) { return true; }
DEVICE bool is_whole(const WorkItem& work) { return work.whole; }

// The word of a warp. split_index: number of the query tile among those that are split.
DEVICE unsigned* count_of(const Sm90ForwardParams& p, int split_index, int warp) {
  return p.arrived + split_index * kConsumerWarps + rank() * kConsumers * 4 + warp;
}

// Reports the partial result of a warp in a query tile, if split_index is not negative.
DEVICE void report(const Sm90ForwardParams& p, int split_index) {
  if (split_index < 0) return;
  const int thread = target::reload_thread_index() - kWarpgroup;
  target::wave_sync();
  if (thread % 32 == 0) target::add_release(count_of(p, split_index, thread / 32), kReported);
}
// The same for the item of this piece that came before.
DEVICE void report_before(const Sm90ForwardParams&, const WorkTile&) {}
DEVICE void report_before(const Sm90ForwardParams& p, const WorkItem& work) { report(p, work.comes_from); }

// Takes the number of the warp's item among those of its query tile. Returns, in lane 0, the word that counts them as
// it was, which the lane does not wait for until it uses it. Whoever takes the last number waits for all others. So a
// warp must not take one while it has key tiles to visit or to skip.
DEVICE unsigned take_number(const Sm90ForwardParams&, const WorkTile&) { return 0; }
DEVICE unsigned take_number(const Sm90ForwardParams& p, const WorkItem& work) {
  unsigned taken = 0;
  if (!work.whole) {
    const int thread = target::reload_thread_index() - kWarpgroup;
    if (thread % 32 == 0) taken = target::fetch_increment_deferred(count_of(p, work.split_index, thread / 32));
  }
  return taken;
}

// Leaves the partial result of the warp's 16 rows in a tile that is split, as other items have the other keys. The warp
// with the last number merges all partial results instead. Returns whether o and softmax are those of all keys now, and
// are to be stored. taken: as of take_number().
DEVICE bool leave_or_merge(const Sm90ForwardParams&, const WorkTile&, unsigned, C (&)[1][kOutBlocks], Softmax&) {
  return true;
}
DEVICE bool leave_or_merge(const Sm90ForwardParams& p, const WorkItem& work, unsigned taken, C (&o)[1][kOutBlocks],
                           Softmax& softmax) {
  // Read anew: otherwise what depends on the index would be computed before the loop over key tiles and kept across it.
  // The shuffle tells the compiler that the warp is the same for all lanes, which keeps the descriptors of products in
  // uniform registers (docs/notes/hopper-forward.md).
  const int thread = target::reload_thread_index() - kWarpgroup;
  const int lane = thread % 32, warp = target::wave_uniform(thread / 32);
  const TileRow own = tile_row(warp * 16);
  const int first_row = first_row_of(work, warp * 16, own);
  // A warp without rows writes nothing, but is counted, so that each reports what came before.
  const bool real = place_of(work, work.head + own.head, first_row, 0).real;

  const TileSpan items = items_of(work);
  const unsigned others = items.end - items.begin - 1;
  const bool last = target::wave_any(lane == 0 && taken % kReported == others);
  Partial* partials = static_cast<Partial*>(p.partials) + rank() * kConsumers * 4 + warp;
  if (!last) {
    if (real) write_partial(partials[int64(work.item) * kConsumerWarps], o, softmax, lane);
    if (!work.goes_on()) report(p, work.split_index);
    return false;
  }
  unsigned* const counted = count_of(p, work.split_index, warp);
  const bool few = kConsumers > 2 || target::wave_any(others < kFewItems);
  if (!few) write_partial(partials[int64(work.item) * kConsumerWarps], o, softmax, lane);
  if (!few || target::wave_any(lane == 0 && taken / kReported != others)) {
    // All lanes loop: ptxas spills registers of the loop over key tiles if one lane does.
    while (target::wave_any(lane == 0 && target::load_acquire(counted) / kReported != others)) {
    }
  } else {
    // All reports came before the number was taken. A fence is quicker than another look, unless writes are under way.
    ptx::fence_acq_rel_device();
  }
  if (lane == 0) *counted = work.goes_on() ? 0u - kReported : 0u;  // 0 for the next launch
  if (!real) return false;
  target::wave_sync();
  const int own_item = work.item - items.begin;
  partials += int64(items.begin) * kConsumerWarps;
  if (few) {
    constexpr int kMost = has_registers(2 * 16) ? 16 : has_registers(2 * 8) ? 8 : 4;
    constexpr int kGroups = (2 * kOutBlocks + kMost - 1) / kMost;
    constexpr int kQuads = round_up((2 * kOutBlocks + kGroups - 1) / kGroups, 2);
    constexpr int kItems = kOutBlocks <= 6 && has_registers(3 * kQuads) ? 2 : 1;  // more columns: ptxas would spill
    merge<true, kQuads, kItems>(o, softmax, partials, others + 1, own_item, lane);
  } else {
    constexpr int kQuads = kOutBlocks <= 8 ? 2 * kOutBlocks : round_up(kOutBlocks, 2);
    merge<false, kQuads, has_registers(2 * kQuads) ? 2 : 1>(o, softmax, partials, others + 1, 0, lane);
  }
  return true;
}

}  // namespace forward
