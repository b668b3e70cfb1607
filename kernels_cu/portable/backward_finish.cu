// The last step of the backward: dq = scale * dq_sum, in natural units (portable/gradient_unit.cuh), in the dtype and
// the layout of dq. A wave takes one physical row, all heads. Where rows are few, several waves share a row.
#include "attn/params.cuh"
#include "attn/physical_row.cuh"
#include "attn/rows.cuh"
#include "attn/sequence.cuh"
#include "portable/gradient_unit.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

namespace backward_finish {

using namespace config;
using C = target::Mma<Element>::C;

constexpr int kWaves = kThreads / target::kWave;
constexpr int kChunk = kCopyBytes / int(sizeof(Element));
constexpr int kChunks = kHeadDim / kChunk;

struct alignas(kCopyBytes) Vector {
  Element x[kChunk];
};

}  // namespace backward_finish

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_backward_finish(PARAMETER BackwardParams p) {
  using namespace backward_finish;
  const ForwardParams& f = p.forward;
  const int wave = target::thread_index() / target::kWave;
  const int lane = target::thread_index() % target::kWave;
  const int64 index = int64(target::block_index()) * kWaves + wave;
  const int shares = 1 << p.query_row_shift, share = static_cast<int>(index & (shares - 1));
  const PhysicalRow own = physical_row<true>(f.q_side, f.batch, index >> p.query_row_shift);
  if (!own.logical) return;

  const float* const sums = p.dq_sum + (own.batch * f.q_side.rows + own.row) * f.nheads_q * kDqPitch;
  Element* const dq = row_at<Element>(p.dq, p.dq_strides, own.batch, own.row);
  for (int i = share * target::kWave + lane; i < f.nheads_q * kChunks; i += shares * target::kWave) {
    const int head = i / kChunks;
    const int column = i % kChunks * kChunk;
    Vector vector;
    UNROLL for (int j = 0; j < kChunk; j++) {
      const float x = sums[int64(head) * kDqPitch + (column + j) / 16 * 16 + C::position((column + j) % 16)];
      vector.x[j] = target::from_float<Element>(f.scores.scale * kFromGradientUnit * x);
    }
    *reinterpret_cast<Vector*>(dq + head * p.dq_strides.head + column) = vector;
  }
}
