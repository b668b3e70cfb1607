// Copies a 16-bit array (q, k or v) to rows that begin at multiples of 16 bytes, for kernels that cannot read its rows
// where they lie. One wave takes one row, all heads.
#include "attn/helper_params.cuh"
#include "attn/rows.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

namespace align_rows {

using namespace config;
using Access = Chunk<kCopyBytes>;

constexpr int kWaves = kThreads / target::kWave;
constexpr int kChunk = kCopyBytes / 2;
constexpr int kChunks = kHeadDim / kChunk;
constexpr int kPitch = round_up(kHeadDim, 8);
static_assert(kHeadDim % kChunk == 0, "an access must not straddle the end of a row");

}  // namespace align_rows

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_align_rows(PARAMETER AlignRowsParams p) {
  using namespace align_rows;
  const int lane = target::thread_index() % target::kWave;
  const int64 index = int64(target::block_index()) * kWaves + target::thread_index() / target::kWave;
  const int64 batch = index / p.rows;
  if (batch >= p.batch) return;
  const auto* const from = row_at<const unsigned short>(p.from, p.strides, batch, index - batch * p.rows);
  unsigned short* const to = static_cast<unsigned short*>(p.to) + index * p.nheads * kPitch;
  // Each access is small, so several are in flight.
  constexpr int kAtOnce = 8;
  const int count = p.nheads * kChunks;
  for (int base = lane; base < count; base += kAtOnce * target::kWave) {
    Access piece[kAtOnce];
    UNROLL for (int n = 0; n < kAtOnce; n++) {
      const int i = base + n * target::kWave;
      if (i < count) {
        piece[n] = *reinterpret_cast<const Access*>(from + i / kChunks * p.strides.head + i % kChunks * kChunk);
      }
    }
    UNROLL for (int n = 0; n < kAtOnce; n++) {
      const int i = base + n * target::kWave;
      if (i < count) *reinterpret_cast<Access*>(to + i / kChunks * kPitch + i % kChunks * kChunk) = piece[n];
    }
  }
}
