// Fills the padding rows of an output, which belong to no sequence: 0 in out, -inf in lse. They form gaps, which may be
// empty. A packed batch has a gap before each sequence and one behind the last, a padded batch one behind each
// sequence.
#pragma once

#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

struct GapRows {
  int64 batch, begin, count;  // of one entry of the batch
};

// The gap behind sequence `gap` - 1. side: that of p, or a copy of it whose integers lie elsewhere.
DEVICE GapRows rows_of_gap(const PaddingParams& p, const Side& side, int gap) {
  const bool packed = side.start.data != nullptr;
  int64 begin = 0, end = gap > 0 || packed ? side.rows : 0;
  if (gap > 0) {
    const Span span = span_of(side, gap - 1);
    begin = span.start + span.length;
  }
  if (packed && gap < p.batch) end = clamp(integer_at(side.start, gap), 0, side.rows);
  return {packed ? 0 : gap - 1, begin, end - begin};
}

// A wave fills every `step`-th row of a gap from its row `first` on, in accesses of kBytes.
template <int kBytes>
DEVICE void fill_out(const PaddingParams& p, const GapRows& rows, int first, int step) {
  const int from = target::thread_index() % target::kWave * kBytes, bytes = p.headdim * p.element_bytes;
  const int64 at = rows.batch * p.out_strides.batch + (rows.begin + first) * p.out_strides.row;
  char* row = static_cast<char*>(p.out) + at * p.element_bytes;
#pragma unroll 1
  for (int64 n = first; n < rows.count; n += step) {
    char* to = row;
#pragma unroll 1
    for (int head = 0; head < p.nheads; head++) {
#pragma unroll 1
      for (int i = from; i < bytes; i += target::kWave * kBytes) *reinterpret_cast<Chunk<kBytes>*>(to + i) = {};
      to += p.out_strides.head * p.element_bytes;
    }
    row += step * p.out_strides.row * p.element_bytes;
  }
}
DEVICE void fill_lse(const PaddingParams& p, const GapRows& rows, int first, int step) {
  const int lane = target::thread_index() % target::kWave;
  float* row = p.lse + rows.batch * p.lse_batch + rows.begin + first;
#pragma unroll 1
  for (int64 n = first; n < rows.count; n += step) {
#pragma unroll 1
    for (int head = lane; head < p.nheads; head += target::kWave) row[head * p.lse_head] = -target::infinity();
    row += step;
  }
}

// To be called by each of the `waves` waves that share the gaps of this output. wave: the caller's number.
DEVICE void fill_padding(const PaddingParams& p, const Side& side, int wave, int waves) {
  if (p.out == nullptr && p.lse == nullptr) return;
  const int gaps = p.batch + 1, parts = waves > gaps ? waves / gaps : 1;
  const auto between = p.out_strides.batch | p.out_strides.row | p.out_strides.head | p.headdim;
  const bool wide = (reinterpret_cast<unsigned long long>(p.out) | between * p.element_bytes) % 16 == 0;
#pragma unroll 1
  for (int share = wave; share < gaps * parts; share += waves) {
    const GapRows rows = rows_of_gap(p, side, share / parts);
    const int first = share % parts;
    if (p.out != nullptr) wide ? fill_out<16>(p, rows, first, parts) : fill_out<2>(p, rows, first, parts);
    if (p.lse != nullptr) fill_lse(p, rows, first, parts);
  }
}
