// The gradient of the learned sinks: dsink = sum over all rows of exp(sink - lse) * row_delta.
//
// One block takes one head, all rows of all sequences, and always adds up in the same order.
#include "attn/params.cuh"
#include "attn/physical_row.cuh"
#include "target/target.cuh"
#include "tile/typed.cuh"

namespace backward_sinks {

using namespace config;

constexpr int kWaves = kThreads / target::kWave;

}  // namespace backward_sinks

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_backward_sinks(PARAMETER BackwardParams p) {
  using namespace backward_sinks;
  SHARED_MEMORY(shared, kWaves * sizeof(float));
  float* const sums = reinterpret_cast<float*>(shared);
  const ForwardParams& f = p.forward;
  const int head = target::block_index();
  const int thread = target::thread_index();
  const float sink = load_number(f.sink_logits.data, f.sink_logits.kind, head * f.sink_logits.head);

  float sum = 0.0f;
  const int64 rows = f.q_side.rows * (f.q_side.start.data == nullptr ? f.batch : 1);
  for (int64 index = thread; index < rows; index += kThreads) {
    const PhysicalRow row = physical_row(f.q_side, f.batch, index);
    if (!row.logical) continue;
    const int64 at = row.batch * f.lse_batch + head * f.lse_head + row.row;
    sum += target::exp(sink - f.lse[at]) * p.row_delta[at];
  }
  UNROLL for (int mask = 1; mask < target::kWave; mask *= 2) sum += target::shuffle_xor(sum, mask);
  if (thread % target::kWave == 0) sums[thread / target::kWave] = sum;
  target::block_sync();
  if (thread != 0) return;
  sum = 0.0f;
  for (int wave = 0; wave < kWaves; wave++) sum += sums[wave];
  // A sink of -inf takes no part: its gradient is 0. The sum may be NaN then, since a row that sees no key has an lse
  // of -inf too.
  const float gradient = sink == -target::infinity() ? 0.0f : sum;
  store_number(p.dsink_logits, f.sink_logits.kind, head * p.dsink_head, gradient);
}
