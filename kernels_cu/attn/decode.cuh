// Decoding: attention of few query rows to many keys, whose time is that of reading the keys (Flash-Decoding, Dao et
// al. 2023). attend() below is the body of the kernels portable/decode.cu and sm90/decode.cu.
//
// A query tile has the rows of kTileQ queries in kHeads heads of one GQA group, ordered by query, then by head. Where a
// group has more heads than a tile has rows, a tile has the rows of one query in some of the heads. The waves of a
// block take key tiles in turn, each with all rows of the query tile. Each wave has a ring of key tiles to itself, so
// it waits for no other wave: while it computes one tile, kStages - 1 others are being loaded. The keys of the whole
// batch are divided evenly among blocks (attn/schedule/line.cuh): a block has a part of this line, which is made of
// segments, one for each query tile that it touches. At the end of a segment, the partial results of the block's waves
// are merged in shared memory. Those of blocks that share a query tile are merged in global memory, by the last of
// these blocks to finish (attn/schedule/shared_tile.cuh).
//
// How key tiles get into a ring differs: the template parameter `Ring` is WaveRing of portable/decode.cu, whose lanes
// copy asynchronously, or TmaRing of sm90/decode.cu, which uses TMA.
#pragma once

#include "attn/decode_output.cuh"
#include "attn/decode_tile.cuh"
#include "attn/decode_work.cuh"
#include "attn/pages.cuh"
#include "attn/params.cuh"
#include "attn/rows.cuh"
#include "attn/schedule/line.cuh"
#include "attn/schedule/seen_lengths.cuh"
#include "attn/schedule/shared_tile.cuh"
#include "attn/score_rule.cuh"
#include "attn/scores.cuh"
#include "attn/softmax.cuh"
#include "attn/stored_keys.cuh"
#include "attn/tiles.cuh"
#include "attn/visible.cuh"
#include "target/target.cuh"
#include "tile/multiply.cuh"

namespace decode {

// The layout of shared memory, in bytes: the rings, each followed by a slab for P where P V reads it from shared
// memory; the queries; what a kernel keeps for each ring; the query tiles that other blocks share; flags; and the
// scratch for cutting the line.
//
// A wave's partial result goes into the one slot of its ring that stays free while the first tiles of the next segment
// are loaded (kPrefetches). Where a slot is too small for it, the next segment is loaded only after the merge, and the
// partial results of all waves lie where rings and queries were.
template <class Ring>
struct Layout {
  static constexpr bool kPrefetches = kPartialBytes <= Ring::kStageBytes;
  static constexpr int kSlabBytes = M::kAccumulatorFeedsA ? 0 : kTileRows * kPitchP * int(sizeof(Element));
  static constexpr int kWaveBytes = kStages * Ring::kStageBytes + kSlabBytes;
  static constexpr int kQueriesAt = kWaves * kWaveBytes;
  static constexpr int kUsed = kQueriesAt + kTileRows * kPitchQ * int(sizeof(Element));
  static constexpr int kMerged = kPrefetches ? 0 : kWaves * kPartialBytes;
  static constexpr int kExtraAt = kUsed > kMerged ? kUsed : kMerged;
  static constexpr int kSharedTilesAt = kExtraAt + kWaves * Ring::kExtraBytes;
  static constexpr int kSharedTilesBytes = 256, kFlagBytes = 16, kRoomBytes = 192;
  static constexpr int kRoomAt = kSharedTilesAt + kSharedTilesBytes + kFlagBytes;
  static_assert(kQueriesAt % 16 == 0 && kExtraAt % 16 == 0 && kSharedTilesAt % 16 == 0, "all parts are aligned");
  static_assert(2 * sizeof(SharedTile<Partials>) <= kSharedTilesBytes, "a part shares two query tiles at most");
  static_assert(sizeof(typename BlockLine::Room) <= kRoomBytes, "the line has room");
  static_assert(kSharedBytes == kRoomAt + kRoomBytes, "the host computes the same size");
};

using RowsVisible = RowsOfHeads<Visible, kHeads>;

// One key tile, with the members that finish_scores() reads of `keys`.
struct OneTile {
  RowsVisible visible;
  int key;
  Edges met;

  DEVICE int first_key(int) const { return key; }
  DEVICE Edges edges(int) const { return met; }
};

using Seen = SeenLengths<kRagged, kPaged, kPlainIntegers, kThreads>;

// Blocks of the next kernel are let in some turns before the end of a block that has few keys, or one part of a query
// tile, and else behind the last turn: blocks that wait for long cost other batches 1 % of the memory bandwidth, but
// the sooner they start, the more of their beginning is hidden, which takes longer in pages (docs/notes/decode.md).
constexpr int kFewBytes = (kPaged ? 4608 : 2304) << 10;  // of keys and values, for all blocks of an SM
constexpr int kLastTurns = kPaged ? 4 : 2;
template <class Ring>
constexpr int kFewTurns = kFewBytes / (kWaves * Ring::kStageBytes * config::kBlocksPerSm);

// The ring of the thread's wave. shared: the block's shared memory, aligned as rings need. more: arguments of the ring.
template <class Ring, class... More>
DEVICE Ring ring_of_wave(unsigned char* shared, const More&... more) {
  using L = Layout<Ring>;
  const int wave = target::thread_index() / target::kWave, lane = target::thread_index() % target::kWave;
  return Ring(shared + wave * L::kWaveBytes, shared + L::kExtraAt + wave * Ring::kExtraBytes, lane, more...);
}

template <class Ring>
OUT_OF_LINE void attend_again(const ForwardParams& p, unsigned char* shared, Ring ring);

// The whole work of a block. kEarly: whether it begins while earlier kernels still run, where it can tell whether what
// it has read then has changed. shared: its shared memory.
template <class Ring, bool kEarly>
DEVICE void attend(const ForwardParams& p, unsigned char* shared, Ring ring) {
  using L = Layout<Ring>;
  auto* const shared_tiles = reinterpret_cast<SharedTile<Partials>*>(shared + L::kSharedTilesAt);
  bool* const flags = reinterpret_cast<bool*>(shared + L::kSharedTilesAt + L::kSharedTilesBytes);
  Element* const queries = reinterpret_cast<Element*>(shared + L::kQueriesAt);
  const int thread = target::thread_index();
  const int lane = thread % target::kWave;
  const int wave = thread / target::kWave;
  Operand* const slab = reinterpret_cast<Operand*>(shared + wave * L::kWaveBytes + kStages * Ring::kStageBytes);

  if constexpr (kPaged)
    prefetch_pages(p.pages, p.k_side.length, p.batch, int64(target::block_index()) * kThreads + thread);
  BlockLine line(p);
  auto& room = *reinterpret_cast<typename BlockLine::Room*>(shared + L::kRoomAt);
  // The first segment is found while earlier kernels still run, and some of its keys are brought to the L2 cache. Such
  // a kernel may write keys, pages and lengths. So once they are done, pages are looked up again, and lengths compared.
  const bool early = kEarly && !kPositions && Seen::has_room(p);
  if (!early) ring.wait_for_prior_kernels();
  Seen seen;
  line.cut(room, [&](int n, const Span& q, const Span& k) {
    if (n == thread) seen.put(q, k);
  });
  Work<Ring> work;
  bool is_found = false;  // whether `work` is a segment that has not begun
  bool differs = false;   // whether a length has changed since the thread has read it
  if (early) {
    is_found = line.at < line.end;
    if (is_found) {
      work = Work<Ring>(p, line, lane);
      work.prefetch(ring, wave, lane);
    }
    ring.wait_for_prior_kernels();
    if (is_found) {
      work.look_up_first(ring, wave, lane);
      work.load_queries(p, queries, wave, lane);
    }
    differs = seen.differ(p, thread);
    if (!is_found) {
      if (kRagged && target::block_any(differs)) attend_again(p, shared, ring);
      return;
    }
  } else if (line.at >= line.end) {
    return;
  }
  Segment previous;  // the segment before
  int slot = 0;      // of the next tile in the wave's ring
  // Entries of `shared_tiles`: the segments that have begun so far whose query tile other blocks share.
  int shared_count = 0;
  bool has_previous = false;  // whether there is a segment `previous`, which is still to be merged

#pragma unroll 1
  while (true) {
    // The first tiles of the next segment are loaded while the partial results of the segment before are merged.
    const bool more = is_found || line.at < line.end;
    const auto begin = [&] {
      if (!is_found) {
        work = Work<Ring>(p, line, lane);
        work.look_up_first(ring, wave, lane);
        work.load_queries(p, queries, wave, lane);
      }
      is_found = false;
      work.load_first(p, ring, slot, wave, lane);
      if (!work.segment.whole()) {
        if (thread == 0) shared_tiles[shared_count] = SharedTile<Partials>(line, work.segment, p.splits);
        shared_count++;
      }
    };
    const int before = shared_count;
    if (L::kPrefetches && more) begin();
    if (has_previous) {
      const unsigned char* const of_waves = L::kPrefetches ? shared + last_slot(slot) * Ring::kStageBytes : shared;
      constexpr int kStride = L::kPrefetches ? L::kWaveBytes : kPartialBytes;
      Partials* of_block = nullptr;
      if (!previous.whole()) of_block = shared_tiles[before - 1].own;
      const auto of_wave = [&](int n) -> const Partials& {
        return *reinterpret_cast<const Partials*>(of_waves + n * kStride);
      };
      merge<kWaves>(Output{p, previous}, thread, kWaves, of_wave, of_block);
      ring.give_back();
    }
    if (!more) break;
    if constexpr (!L::kPrefetches) {
      target::block_sync();
      begin();
    }
    ring.wait_for_queries();
    if (!kEarly || !kRagged) {
      target::block_sync();
    } else if (target::block_any(differs)) {
      work.drop(ring, slot, wave);
      attend_again(p, shared, ring);
      return;
    }
    float unit = 1.0f;  // the factor that undoes the scaling of the converted queries
    if constexpr (kConvertsQueries) {
      const QueryTile<kTileRows, kDepthQk, kPitchQ> tile{queries};
      const int exponent = tile.exponent(lane);
      target::block_sync();  // all waves have read all queries
      tile.convert(exponent, thread, kThreads);
      target::block_sync();
      unit = target::float_of(static_cast<unsigned>(exponent) << 23);
    }
    const auto load_query = [&](int m, int step) {
      const Operand* const tile = reinterpret_cast<const Operand*>(queries);
      return load_queries<M>(tile + m * C::kRows * kPitchQ + step * M::kDepth, kPitchQ, lane);
    };
    typename M::A held[kHoldsQueries ? kRowBlocks : 1][kHoldsQueries ? kSteps : 1];
    if constexpr (kHoldsQueries) {
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int step = 0; step < kSteps; step++) held[m][step] = load_query(m, step);
      }
    }
    const auto query = [&](int m, int step) {
      if constexpr (kHoldsQueries) {
        return held[m][step];
      } else {
        return load_query(m, step);
      }
    };
    const Visible visible = work.key_tiles.visible;
    const RowsVisible rows_visible{visible, work.first, visible.sink};
    Rules rules(p, work.segment.sequence, work.segment.head, work.first, work.segment.rows, work.segment.q.length,
                work.segment.k.length, visible.offset, lane);
    if constexpr (kConvertsQueries) rules.scale_keys(unit);
    Softmax softmax(kScaleFirst || ScoreRule::kGivesScaledScores ? Exponent::kUnit : rules.scale() * Exponent::kUnit);
    C o[kRowBlocks][kOutBlocks];
    UNROLL for (int m = 0; m < kRowBlocks; m++) { UNROLL for (int d = 0; d < kOutBlocks; d++) o[m][d] = C{}; }
    const bool lines_by_step = Added::can_step_lines(rules, 0, lane);

    // The turn before which the next kernel may start, if it is not behind the last one.
    int lets_in = -1;
    if (early && line.at >= line.end) {
      const bool is_one_part = !has_previous && !work.segment.whole();
      if (is_one_part || line.has_few_units(kFewTurns<Ring>, work.rounds()))
        lets_in = work.rounds() > kLastTurns ? work.rounds() - kLastTurns : 0;
    }
    // All waves take the same number of turns, even without a tile in the last one: so they agree on `slot`.
#pragma unroll 1
    for (int n = 0; n < work.rounds(); n++, slot = next_slot(slot)) {
      if (n == lets_in) ring.launch_dependents();
      const int tile = work.tile(n, wave);
      if (tile >= work.span.end) continue;
      const auto load_next = [&] {
        ring.wait_for_pages();
        work.load(p, ring, last_slot(slot), n + kStages - 1, wave, lane);
      };
      if (work.is_empty(slot)) {
        target::wave_sync();
        load_next();
        continue;
      }
      const int first_key = work.key_tiles.first_key(tile);
      // Loaded while the wave waits for the tile.
      Added added;
      added.lines_by_step = lines_by_step;
      added.load(rules, 0, first_key, lane);
      // After the wave_sync() all lanes may read the tile, and the slot of the tile before it may be refilled.
      ring.wait(slot);
      work.real_rows(tile, [&](const auto& real) { ring.clear(slot, real, lane); });
      target::wave_sync();
      if (!Ring::kLoadsLate) load_next();

      const auto seen = work.mask.seen(p, first_key, lane);
      C s[kRowBlocks][kKeyBlocks];
      product_with_rows<M, kSteps, kUnrolledSteps>(s, query, ring.keys(slot), lane);
      if (Ring::kLoadsLate) load_next();
      const SoftmaxScore<kScaleFirst> finish{rules.scale()};
      const Edges edges = visible.edges(first_key, first_key + kTileK - 1, work.first, work.last());
      finish_scores(s, rules, added, finish, OneTile{rows_visible, first_key, edges}, 0, 0, lane);
      seen.hide(s, finish.masked(), lane, added.bias_clearer());
      // P V would be NaN where V is NaN, even for a probability of 0: rows of V that no query row sees are cleared.
      if (seen.for_each_unseen_key(lane, [&](int key) { ring.clear_value(slot, key); })) {
        ring.publish_cleared_values();
        target::wave_sync();
      }
      if (softmax.update_row_max(s, added)) softmax.rescale(o);
      softmax.exponentiate(s);
      multiply_accumulators<M, kUnrolledSteps, kPitchP>(o, s, slab, ring.values(slot), lane);
    }
    softmax.sum_rows();

    if constexpr (L::kPrefetches) {
      target::wave_sync();  // all lanes are done with the last tile
      reinterpret_cast<Partials*>(ring.bytes(last_slot(slot)))->store(o, softmax, work.segment.rows, lane);
    } else {
      target::block_sync();
      reinterpret_cast<Partials*>(shared + wave * kPartialBytes)->store(o, softmax, work.segment.rows, lane);
    }
    target::block_sync();
    previous = work.segment;
    has_previous = true;
  }
  ring.launch_dependents();
  if (shared_count == 0) return;

  // All stores of the block come before its arrival; the loads of the last block to arrive come after it.
  target::block_sync();
  if (thread < shared_count) flags[thread] = shared_tiles[thread].arrive(p.splits);
  target::block_sync();
#pragma unroll 1
  for (int n = 0; n < shared_count; n++) {
    if (!flags[n]) continue;
    const SharedTile<Partials> tile = shared_tiles[n];
    merge_parts(p, tile, flags[n], thread);
  }
}

// The same for a block that began with lengths which have changed since. Its instructions lie apart, so that other
// blocks have no register less for them.
template <class Ring>
OUT_OF_LINE void attend_again(const ForwardParams& p, unsigned char* shared, Ring ring) {
  attend<Ring, false>(p, shared, ring);
}

}  // namespace decode
