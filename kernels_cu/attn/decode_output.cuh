// The end of the decoding kernels (attn/decode.cuh): merges the partial results of a block's waves, then those of the
// blocks that share a query tile, and writes output rows. What is written is evicted from the L2 cache last: keys that
// stream by would drive it out to DRAM, which takes time from them (docs/notes/decode.md).
#pragma once

#include "attn/decode_tile.cuh"
#include "attn/exponent.cuh"
#include "attn/row_alone.cuh"
#include "attn/rows.cuh"
#include "attn/schedule/shared_tile.cuh"
#include "attn/stored_keys.cuh"
#include "target/store_evict_last.cuh"

namespace decode {

// Stores four columns of an output row, or fewer at its end: the row has `columns` more.
DEVICE void store_columns(Element* out, const FourFloats& x, int columns) {
  alignas(16) Element y[4];
  UNROLL for (int i = 0; i < 4; i++) y[i] = target::from_float<Element>(x.x[i]);
  constexpr int kWidth = kCopyBytes < 4 * int(sizeof(Element)) ? kCopyBytes : 4 * int(sizeof(Element));
  constexpr int kAtOnce = kWidth / int(sizeof(Element));
  UNROLL for (int i = 0; i < 4; i += kAtOnce) {
    if (i < columns) target::store_evict_last<kWidth>(out + i, y + i);
  }
}

// Writes rows that are merged over all keys to out and lse.
struct Output {
  const ForwardParams& p;
  const Segment& segment;

  DEVICE int first() const { return segment.tile * kTileQ; }

  // Returns whether a column is NaN or infinite.
  template <int kFours>
  DEVICE bool write(int row, int first_column, MergedColumns<kFours> x) const {
    const int head = segment.head + row % kHeads;
    if constexpr (kSinkLogits) x.add_sink(per_head(p.sink_logits, segment.sequence, head) * Exponent::kUnit);
    x.divide(value_factor(p, head));
    const auto out =
        rows_of_heads<kHeads, Element>(p.out, p.out_strides, segment.sequence, segment.q, segment.head, first());
    UNROLL for (int f = 0; f < kFours; f++) {
      const int column = first_column + f * 4;
      if (column < kHeadDimV) store_columns(out.from(row).address() + column, x.out[f], kHeadDimV - column);
    }
    if (p.lse != nullptr && first_column == 0) {
      p.lse[segment.sequence * p.lse_batch + head * p.lse_head + segment.q.start + first() + row / kHeads] = x.lse();
    }
    return x.has_nan();
  }

  // Computes NaN columns again (attn/row_alone.cuh): of the pieces [first, behind) of kColumns columns, which the wave
  // has written. The pieces of a row, kPerRow of them, follow each other.
  template <int kColumns, int kPerRow>
  DEVICE void rewrite_nan(int first, int behind) const {
    const auto out =
        rows_of_heads<kHeads, Element>(p.out, p.out_strides, segment.sequence, segment.q, segment.head, this->first());
#pragma unroll 1
    for (int row = first / kPerRow; row * kPerRow < behind; row++) {
      const int begin = first - row * kPerRow, end = behind - row * kPerRow;
      const ColumnRange columns{(begin > 0 ? begin : 0) * kColumns, (end < kPerRow ? end : kPerRow) * kColumns};
      attend_alone(p, segment.sequence, segment.head + row % kHeads, this->first() + row / kHeads, segment.q, segment.k,
                   out.from(row).address(), NoMoreHidden{}, columns);
    }
  }
};

// Merges `count` partial results; part(n) is the n-th. The rows are written to the output, or to `destination` where
// more partial results are to be merged. Each thread has four columns of a row, or eight if four would leave it a
// second turn.
template <int kAtOnce, class Part>
DEVICE void merge(const Output& output, int thread, int count, const Part& part, Partials* destination) {
  constexpr int kFours = kRows * (kDepthV / 4) > kThreads ? 2 : 1, kColumns = 4 * kFours;
  constexpr int kPerRow = kDepthV / kColumns;
  const int pieces = output.segment.rows * kPerRow, lane = thread % target::kWave;
  // The same turns for all lanes of a wave.
#pragma unroll 1
  for (int first = target::wave_uniform(thread - lane); first < pieces; first += kThreads) {
    const int n = first + lane, row = n / kPerRow, column = n % kPerRow * kColumns;
    bool nan = false;
    if (n < pieces) {
      MergedColumns<kFours> merged;
      merged.template merge<kAtOnce>(count, row, column, part);
      if (destination == nullptr) {
        nan = output.write(row, column, merged);
      } else {
        UNROLL for (int f = 0; f < kFours; f++)
            target::store_evict_last<16>(&destination->out[row][column / 4 + f], &merged.out[f]);
        if (column == 0) {
          destination->running_max[row] = merged.running_max;
          destination->sum[row] = merged.sum;
        }
      }
    }
    if (kHidesFromSome && target::wave_any(nan)) {
      target::wave_sync();
      const int behind = first + target::kWave;
      output.template rewrite_nan<kColumns, kPerRow>(first, behind < pieces ? behind : pieces);
    }
  }
}

// Merges the parts of a query tile, in the block that arrived last. Where there are very many, that is the last block
// of a bunch of parts (attn/schedule/shared_tile.cuh): it merges the bunch, and the last block to do so merges the
// bunches. flag: in shared memory.
DEVICE void merge_parts(const ForwardParams& p, const SharedTile<Partials>& tile, bool& flag, int thread) {
  const auto bunch = tile.bunch(p.splits);
  auto parts = tile.parts;
  const auto bunches = parts.bunches(bunch.size);
  int count = bunch.count;
  Partials* merged = nullptr;
  if (bunch.bunches > 1) {
    parts = parts.from(bunch.begin);
    merged = &bunches(bunch.begin / bunch.size);
  }
#pragma unroll 1
  while (true) {
    merge<SharedTile<Partials>::kAtOnce>(Output{p, tile.segment}, thread, count, parts, merged);
    if (merged == nullptr) return;
    target::block_sync();
    count = bunch.bunches;
    if (thread == 0) flag = tile.arrive_of_bunch(p.splits, count);
    target::block_sync();
    if (!flag) return;
    parts = bunches;
    merged = nullptr;
  }
}

}  // namespace decode
