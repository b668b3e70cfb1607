// Fills the rows of an output that belong to no sequence: 0 in out, -inf in lse. Block g fills the gap after sequence g
// - 1 (before the first sequence for g = 0), one warp-wide sweep a row; (batch + 1) * parts blocks of kThreads.
#pragma once

#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

// side: that of p, or a copy of it with its integers elsewhere. block: among those of this output.
template <int kThreads>
DEVICE void fill_padding(const PaddingParams& p, const Side& side, int block) {
  if (p.out == nullptr && p.lse == nullptr) return;
  const int gap = block / p.parts;
  const int part = block % p.parts;
  const bool packed = side.start.data != nullptr;
  const int sequence = gap - 1;
  int64 begin = 0;
  int64 end = side.rows;
  if (sequence >= 0) {
    const Span span = span_of(side, sequence);
    begin = span.start + span.length;
  } else if (!packed) {
    return;
  }
  if (packed && gap < p.batch) end = clamp(integer_at(side.start, gap), 0, side.rows);
  const int64 batch = packed ? 0 : sequence;

  const int wave = target::thread_index() / target::kWave;
  const int lane = target::thread_index() % target::kWave;
  constexpr int kWaves = kThreads / target::kWave;
  for (int64 row = begin + part * kWaves + wave; row < end; row += p.parts * kWaves) {
    for (int head = 0; head < p.nheads; head++) {
      const int64 at = batch * p.out_strides.batch + row * p.out_strides.row + head * p.out_strides.head;
      for (int d = p.out != nullptr ? lane : p.headdim; d < p.headdim; d += target::kWave) {
        if (p.element_bytes == 4) {
          static_cast<unsigned*>(p.out)[at + d] = 0;
        } else {
          static_cast<unsigned short*>(p.out)[at + d] = 0;
        }
      }
      if (p.lse != nullptr && lane == 0) p.lse[batch * p.lse_batch + head * p.lse_head + row] = -target::infinity();
    }
  }
}
