// Parts of dk and dv, where several blocks of the backward share a key tile. They lie in memory in float32, each 16
// columns in the order of C::position(). portable/backward_parts.cu adds them up.
#pragma once

#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

// Rows of keys in a part of dk or dv: how many there are, and the first one of a sequence.
struct PartRows {
  int64 rows_per_part, first;
};
// kSinks: a part has p.sink_rows rows for each sequence, whether it has as many keys or not. Else it has the rows of
// the array of keys, which packed sequences share.
template <bool kSinks, bool kRagged>
DEVICE PartRows part_rows(const BackwardParams& p, int sequence, const Span& keys) {
  const ForwardParams& f = p.forward;
  if (kSinks) return {int64(f.batch) * p.sink_rows, int64(sequence) * p.sink_rows};
  const bool packed = kRagged && f.k_side.start.data != nullptr;
  return {(packed ? 1 : f.batch) * f.k_side.rows, (packed ? 0 : sequence) * f.k_side.rows + keys.start};
}

// Stores `factor` times a wave's gradient to `sums`, whose rows are `stride` floats apart. keys: how many rows are
// real.
template <class C, int kKeyBlocks, int kDepthBlocks>
DEVICE void store_part(const C (&gradient)[kKeyBlocks][kDepthBlocks], float factor, float* sums, int64 stride, int keys,
                       int lane) {
  struct alignas(C::kRun * sizeof(float)) Run {
    float x[C::kRun];
  };
  UNROLL for (int m = 0; m < kKeyBlocks; m++) {
    UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
      const int row = m * 16 + C::row(lane, slot);
      if (row >= keys) continue;
      float* const first = sums + row * stride + C::position(C::column(lane, C::element(slot, 0)));
      UNROLL for (int d = 0; d < kDepthBlocks; d++) {
        Run run;
        UNROLL for (int i = 0; i < C::kRun; i++) run.x[i] = factor * gradient[m][d].x[C::element(slot, i)];
        *reinterpret_cast<Run*>(first + d * 16) = run;
      }
    }
  }
}
