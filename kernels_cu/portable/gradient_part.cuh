// Parts of dk and dv, where several blocks share a key tile: in float32, columns of 16 in the order of C::position().
// What adds them up is portable/backward_parts.cu.
#pragma once

#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

// Rows of keys of a part of dk or dv: all of them, and where a sequence's begin.
struct PartRows {
  int64 all, first;
};
// kSinks: each sequence's first p.sink_rows, whether it has as many or not. Else packed sequences share the rows of one
// array.
template <bool kSinks, bool kRagged>
DEVICE PartRows part_rows(const BackwardParams& p, int sequence, const Span& keys) {
  const ForwardParams& f = p.forward;
  if (kSinks) return {int64(f.batch) * p.sink_rows, int64(sequence) * p.sink_rows};
  const bool packed = kRagged && f.k_side.start.data != nullptr;
  return {(packed ? 1 : f.batch) * f.k_side.rows, (packed ? 0 : sequence) * f.k_side.rows + keys.start};
}

// `factor` times what a block has of a wave's gradient, to `sums`.
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
