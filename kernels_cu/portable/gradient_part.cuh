// Parts of dk and dv, where several blocks share a key tile: in float32, columns of 16 in the order of C::position().
// What adds them up is portable/backward_parts.cu.
#pragma once

#include "target/target.cuh"

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
