// Adds up the sums that several blocks have made of each element of dbias (the splits of portable/backward_bias.cu),
// always in the same order. One thread takes one element.
#include "attn/params.cuh"
#include "target/target.cuh"

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_backward_bias_sum(PARAMETER BackwardParams p) {
  const Bias& bias = p.forward.bias;
  const BiasGradient& d = p.dbias;
  const int64 count = int64(d.batches) * d.heads * bias.rows * bias.keys;
  const int64 index = int64(target::block_index()) * config::kThreads + target::thread_index();
  if (index >= count) return;
  float sum = 0.0f;
  for (int split = 0; split < d.splits; split++) sum += d.partials[split * count + index];
  const int64 j = index % bias.keys, i = index / bias.keys % bias.rows;
  const int64 entry = index / bias.keys / bias.rows;
  const int64 at = entry / d.heads * d.batch + entry % d.heads * d.head + i * d.row + j * d.key;
  static_cast<config::Element*>(d.data)[at] = target::from_float<config::Element>(sum);
}
