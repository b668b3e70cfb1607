// Writes the gradient of an array that a score function captured from its sums (portable/captured_gradients.cuh), in
// the array's dtype and layout. One thread takes one element.
//
// The sums become zeros again, since the next run adds to them.
#include "attn/params.cuh"
#include "portable/exact_sum.cuh"
#include "target/target.cuh"
#include "tile/typed.cuh"

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_backward_captured(PARAMETER CapturedGradientParams p) {
  const int64 index = int64(target::block_index()) * config::kThreads + target::thread_index();
  if (index >= p.count) return;
  int64 at = 0, left = index;
  UNROLL for (int axis = 3; axis >= 0; axis--) {
    at += left % p.extents[axis] * p.strides[axis];
    left /= p.extents[axis];
  }
  if constexpr (config::kExactSums) {
    store_number(p.to, p.kind, at, static_cast<ExactSum*>(p.sums)[p.first + index].read_and_clear());
  } else {
    float& sum = static_cast<float*>(p.sums)[p.first + index];
    store_number(p.to, p.kind, at, sum);
    sum = 0.0f;
  }
}
