// Writes dbias from what the main kernel left in scratch memory (portable/bias_gradient.cuh): float32 sums (kSums), or
// elements, in rows padded to a multiple of 16 keys. With kClears it clears those sums before the main kernel instead.
// One wave takes one row.
#include "attn/params.cuh"
#include "portable/dbias_sum_position.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_backward_bias_rows(PARAMETER BackwardParams p) {
  using config::Element;
  const Bias& bias = p.forward.bias;
  const BiasGradient& d = p.dbias;
  const int lane = target::thread_index() % target::kWave;
  const int64 line =
      int64(target::block_index()) * (config::kThreads / target::kWave) + target::thread_index() / target::kWave;
  const int64 entry = line / bias.rows, i = line % bias.rows;
  if (entry >= int64(d.batches) * d.heads) return;
  const int pitch = round_up(bias.keys, 16);
  float* const sums = d.partials + line * pitch;
  if constexpr (config::kClears) {
    for (int j = lane * 4; j < pitch; j += target::kWave * 4) {
      *reinterpret_cast<Chunk<16>*>(sums + j) = Chunk<16>{0, 0, 0, 0};
    }
  } else {
    const int64 at = entry / d.heads * d.batch + entry % d.heads * d.head + i * d.row;
    Element* const to = static_cast<Element*>(d.data) + at;
    const Element* const rows = static_cast<const Element*>(static_cast<const void*>(d.partials)) + line * pitch;
    // Each access is small, so several are in flight.
#pragma unroll 4
    for (int j = lane; j < bias.keys; j += target::kWave) {
      if constexpr (config::kSums) {
        to[j * d.key] = target::from_float<Element>(sums[j / 16 * 16 + dbias_sum_position(j % 16)]);
      } else {
        to[j * d.key] = rows[j];
      }
    }
  }
}
