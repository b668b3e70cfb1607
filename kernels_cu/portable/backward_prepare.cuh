// The first step of the backward: computes row_delta (portable/row_delta.cuh), and clears the sums of dq and the note
// of NaN.
//
// A wave takes one physical row, several heads at a time. Several waves share the heads of a long row, more
// of them where rows are few. Rows of no sequence are not touched.
#pragma once

#include "attn/params.cuh"
#include "attn/physical_row.cuh"
#include "attn/rows.cuh"
#include "portable/row_delta.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

namespace backward_prepare {

using namespace config;

constexpr int kWaves = kThreads / target::kWave;

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
  for (int first = share * row_delta::kDots; first < f.nheads_q; first += shares * row_delta::kDots) {
    const int head = first + lane / row_delta::kLanes, part = lane % row_delta::kLanes;
    // Lanes without a head of their own repeat the last one: all lanes must take part in the shuffles.
    const int64 real = head < f.nheads_q ? head : f.nheads_q - 1;
    const float dot = row_delta::dot(dout + real * p.dout_strides.head, out + real * f.out_strides.head, part);
    if (part == 0 && head < f.nheads_q) {
      const int64 at = own.batch * f.lse_batch + head * f.lse_head + own.row;
      p.row_delta[at] = row_delta::Terms(p, at).delta(dot);
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
