// The gradient of the bias from what the main kernel made of it (portable/bias_gradient.cuh): float32 sums, or elements
// in rows of whole 16 keys; or those sums cleared before it. A block has a row.
#include "attn/params.cuh"
#include "portable/summed_position.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_backward_bias_rows(PARAMETER BackwardParams p) {
  const Bias& bias = p.forward.bias;
  const BiasGradient& d = p.dbias;
  const int64 line = target::block_index();
  const int pitch = round_up(bias.keys, 16);
  if constexpr (config::kClears) {
    float* const sums = d.partials + line * pitch;
    for (int j = target::thread_index() * 4; j < pitch; j += config::kThreads * 4) {
      *reinterpret_cast<Chunk<16>*>(sums + j) = Chunk<16>{0, 0, 0, 0};
    }
  } else {
    const int64 entry = line / bias.rows, i = line % bias.rows;
    const int64 at = entry / d.heads * d.batch + entry % d.heads * d.head + i * d.row;
    config::Element* const to = static_cast<config::Element*>(d.data) + at;
    if constexpr (config::kSums) {
      const float* const sums = d.partials + line * pitch;
      for (int j = target::thread_index(); j < bias.keys; j += config::kThreads) {
        to[j * d.key] = target::from_float<config::Element>(sums[j / 16 * 16 + summed_position(j % 16)]);
      }
    } else {
      const config::Element* const from = static_cast<const config::Element*>(static_cast<const void*>(d.partials));
      for (int j = target::thread_index(); j < bias.keys; j += config::kThreads) to[j * d.key] = from[line * pitch + j];
    }
  }
}
