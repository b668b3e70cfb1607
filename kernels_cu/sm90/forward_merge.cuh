// Merges the partial results of a query tile that stream-K has split by keys (attn/schedule/stream_k.cuh). An item is
// the part of such a tile that one block, or one cluster, has computed.
//
// Each warp works for itself. In every item of the tile one warp owns the same 16 rows. Each of these warps takes a
// number when it has computed its item, writes its partial result to global memory, and reports that it is there. The
// one with the last number reports nothing. It waits for the reports of the others, which are about to write, and
// merges all partial results, in the order of keys. So the bits of the result do not depend on which warp is last.
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
// The partial result of a warp's 16 rows: each lane's part of the output, divided by the row sums, and the running
// maxima and sums of the lane's two rows. Lanes lie side by side.
struct Partial {
  Quad out[2 * kOutBlocks][32];
  Quad softmax[32];
};
static_assert(C::kElements == 8 && C::kSlots == 2, "two quads of each block");
constexpr int kConsumerWarps = kCluster * kConsumers * 4;  // consumer warps that work on an item
// A word for each warp counts the items of a query tile: those with a number, and, times kReported, those reported.
constexpr unsigned kReported = 1u << 16;
// The output is merged in kOutputParts parts of kPartBlocks blocks of 16 columns. A part has as many blocks as there
// are registers for, together with loads that are in flight. Where there are two parts the number is even, since stores
// take two blocks at a time.
constexpr int kOutputParts = kOutBlocks > 8 ? 2 : 1;
constexpr int kPartBlocks = kOutputParts == 1 ? kOutBlocks : round_up((kOutBlocks + 1) / 2, 2);
// kItemsAtOnce: items whose loads are in flight together. Two, if there are registers for two items and the merged
// result, 8 for each of their blocks, beside kOtherRegisters for all else.
constexpr int kOtherRegisters = kOutputParts * kPartBlocks == kOutBlocks ? 40 : 64;
constexpr int kItemsAtOnce = !kBias && kConsumerRegisters >= 3 * 8 * kPartBlocks + kOtherRegisters ? 2 : 1;

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

// Merges the partial results of all items, which lie kConsumerWarps apart: the output, in blocks from `first` on, and
// the running maxima and sums. sink: the head's learned sink in units of the exponent, which counts once for all items.
DEVICE void merge(C (&o)[1][kPartBlocks], Softmax& all, int first, const Partial* partials, int items, float sink,
                  int lane) {
  auto &running_max = all.running_max[0], &sum = all.sum[0];
  UNROLL for (int d = 0; d < kPartBlocks; d++) o[0][d] = C{};
#pragma unroll 1
  for (int item = 0; item < items; item += kItemsAtOnce) {
    Quad rows[kItemsAtOnce], out[kItemsAtOnce][2 * kPartBlocks];
    UNROLL for (int n = 0; n < kItemsAtOnce; n++) {
      // Past the last item the last one is read again, with a weight of 0.
      const bool real = item + n < items;
      const Partial& partial = partials[(real ? item + n : items - 1) * kConsumerWarps];
      rows[n] = partial.softmax[lane];
      if (!real) rows[n] = {-target::infinity(), -target::infinity(), 0.0f, 0.0f};
      UNROLL for (int d = 0; d < 2 * kPartBlocks; d++) {
        // Past the last columns others are read in their place; what comes of them is not stored.
        const int quad = 2 * first + d;
        const bool inside = kOutputParts * kPartBlocks == kOutBlocks || quad < 2 * kOutBlocks;
        out[n][d] = partial.out[inside ? quad : d][lane];
      }
    }
    UNROLL for (int n = 0; n < kItemsAtOnce; n++) {
      float before[C::kSlots], weight[C::kSlots];
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const float last = running_max[slot];
        running_max[slot] = fmaxf(last, rows[n].x[slot]);
        before[slot] = Exponent::power(last - all.shift(0, slot));
        weight[slot] = Exponent::power(rows[n].x[slot] - all.shift(0, slot)) * rows[n].x[2 + slot];
        sum[slot] = sum[slot] * before[slot] + weight[slot];
      }
      UNROLL for (int d = 0; d < kPartBlocks; d++) {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          float& x = o[0][d].x[e];
          x = x * before[C::slot(e)] + out[n][2 * d + e / 4].x[e % 4] * weight[C::slot(e)];
        }
      }
    }
  }
  if constexpr (kSinkLogits) {
    all.add_sink(sink);
    all.rescale(o);
  }
  all.divide(o);
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

// Leaves the partial result of the warp's 16 rows in a tile that is split: other items have the other keys. The warp
// with the last number merges all partial results and stores the output. Returns whether the lane's part of a stored
// output may have a NaN of a hidden value.
DEVICE bool store_partial(const Sm90ForwardParams&, const WorkTile&, const C (&)[1][kOutBlocks], const Softmax&) {
  return false;
}
DEVICE bool store_partial(const Sm90ForwardParams& p, const WorkItem& work, const C (&o)[1][kOutBlocks],
                          const Softmax& softmax) {
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
  unsigned* const counted = count_of(p, work.split_index, warp);
  unsigned number = 0;
  if (lane == 0) number = target::fetch_increment_deferred(counted) % kReported;
  Partial* partials = static_cast<Partial*>(p.partials) + rank() * kConsumers * 4 + warp;
  if (real) write_partial(partials[int64(work.item) * kConsumerWarps], o, softmax, lane);
  if (!target::wave_any(lane == 0 && number == others)) {
    if (!work.goes_on()) report(p, work.split_index);
    return false;
  }
  // All lanes loop: ptxas spills registers of the loop over key tiles if one lane does.
  while (target::wave_any(lane == 0 && target::load_acquire(counted) / kReported != others)) {
  }
  if (lane == 0) *counted = work.goes_on() ? 0u - kReported : 0u;  // 0 for the next launch
  if (!real) return false;
  target::wave_sync();
  partials += int64(items.begin) * kConsumerWarps;
  bool nan = false;
#pragma unroll 1
  for (int part = 0; part < kOutputParts; part++) {
    C merged[1][kPartBlocks];
    Softmax all(1.0f);
    float sink = 0.0f;
    if constexpr (kSinkLogits)
      sink = per_head(p.forward.sink_logits, work.sequence, work.head + own.head) * Exponent::kUnit;
    merge(merged, all, part * kPartBlocks, partials, others + 1, sink, lane);
    store_rows(p.forward, work, merged, part * kPartBlocks, work.head + own.head, first_row, lane);
    if (part == 0) store_lse(p.forward, work, all, work.head + own.head, first_row, lane);
    nan = nan || has_hidden_nan(merged);
  }
  return nan;
}

}  // namespace forward
