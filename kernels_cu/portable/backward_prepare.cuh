// The first step of the backward: computes row_delta, which dS needs of each query row, and clears the sums of dq and
// the note of NaN.
//
//   row_delta = dlse - dout . out, 0 where lse is -inf        dq_sum = 0        found_nan = 0
//
// A wave takes one physical row, kHeadsAtOnce heads at a time. Where rows are few, several waves share the heads of a
// row. Rows of no sequence are not touched.
#pragma once

#include "attn/params.cuh"
#include "attn/physical_row.cuh"
#include "attn/rows.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

namespace backward_prepare {

using namespace config;

constexpr int kWaves = kThreads / target::kWave;
constexpr int kChunk = kCopyBytes / int(sizeof(Element));
constexpr int kChunks = (kHeadDimV + kChunk - 1) / kChunk;
constexpr int kLanes = power_of_two_from(kChunks) < target::kWave ? power_of_two_from(kChunks) : target::kWave;
constexpr int kHeadsAtOnce = target::kWave / kLanes;

struct alignas(kCopyBytes) Vector {
  Element x[kChunk];
};

// The dot product of two rows of a head, by kLanes lanes, all of which get it. lane: the lane among these.
DEVICE float dot(const Element* a, const Element* b, int lane) {
  float sum = 0.0f;
  UNROLL for (int base = 0; base < kChunks; base += kLanes) {
    const int chunk = base + lane;
    if (kChunks % kLanes == 0 || chunk < kChunks) {
      const Vector x = reinterpret_cast<const Vector*>(a)[chunk];
      const Vector y = reinterpret_cast<const Vector*>(b)[chunk];
      UNROLL for (int i = 0; i < kChunk; i++) sum += target::to_float(x.x[i]) * target::to_float(y.x[i]);
    }
  }
  UNROLL for (int mask = 1; mask < kLanes; mask *= 2) sum += target::shuffle_xor(sum, mask);
  return sum;
}

// block: its index among the blocks that visit rows.
DEVICE void prepare(const BackwardParams& p, int block) {
  const ForwardParams& f = p.forward;
  const int wave = target::thread_index() / target::kWave;
  const int lane = target::thread_index() % target::kWave;
  const int64 index = int64(block) * kWaves + wave;
  const int shares = 1 << p.query_row_shift, share = static_cast<int>(index & (shares - 1));
  if (p.found_nan != nullptr && block == 0 && target::thread_index() == 0) *p.found_nan = 0;
  const PhysicalRow own = physical_row<true>(f.q_side, f.batch, index >> p.query_row_shift);
  if (!own.logical) return;

  const Element* const out = row_at<const Element>(f.out, f.out_strides, own.batch, own.row);
  const Element* const dout = row_at<const Element>(p.dout, p.dout_strides, own.batch, own.row);
  for (int first = share * kHeadsAtOnce; first < f.nheads_q; first += shares * kHeadsAtOnce) {
    const int head = first + lane / kLanes;
    // Lanes without a head of their own repeat the last one: all lanes must take part in the shuffles.
    const int64 real = head < f.nheads_q ? head : f.nheads_q - 1;
    float delta = -dot(dout + real * p.dout_strides.head, out + real * f.out_strides.head, lane % kLanes);
    if (lane % kLanes == 0 && head < f.nheads_q) {
      const int64 at = own.batch * f.lse_batch + head * f.lse_head + own.row;
      if (p.dlse != nullptr) delta += p.dlse[at];
      p.row_delta[at] = f.lse[at] == -target::infinity() ? 0.0f : delta;
    }
  }
  if (p.dq_sum != nullptr) {
    const int64 count = int64(f.nheads_q) * kDqPitch / 4;
    Chunk<16>* const sum = reinterpret_cast<Chunk<16>*>(p.dq_sum) + (own.batch * f.q_side.rows + own.row) * count;
    const int64 step = int64(shares) * target::kWave;
    for (int64 i = share * target::kWave + lane; i < count; i += step) sum[i] = Chunk<16>{0, 0, 0, 0};
  }
}

}  // namespace backward_prepare
