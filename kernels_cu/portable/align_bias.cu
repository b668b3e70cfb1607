// Copies a 16-bit bias to rows that begin at multiples of 16 bytes, for kernels that cannot read its rows where they
// lie. Zeros pad the rows. One wave takes one row.
#include "attn/helper_params.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_align_bias(PARAMETER AlignBiasParams p) {
  const int lane = target::thread_index() % target::kWave;
  const int64 line =
      int64(target::block_index()) * (config::kThreads / target::kWave) + target::thread_index() / target::kWave;
  if (line >= p.lines) return;
  const int64 entry = line / p.rows;
  const int64 at = entry / p.nheads * p.batch + entry % p.nheads * p.head + line % p.rows * p.row;
  const unsigned short* const from = static_cast<const unsigned short*>(p.from) + at;
  const int pairs = round_up(p.keys, 8) / 2;
  unsigned* const to = static_cast<unsigned*>(p.to) + line * pairs;
  // Each access is small, so several are in flight.
#pragma unroll 4
  for (int n = lane; n < pairs; n += target::kWave) {
    const int key = 2 * n;
    const unsigned even = key < p.keys ? from[key] : 0, odd = key + 1 < p.keys ? from[key + 1] : 0;
    to[n] = even | odd << 16;
  }
}
