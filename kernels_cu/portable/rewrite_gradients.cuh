// Gradients that have a NaN, all of a call or those of a sequence, computed again without what is hidden
// (portable/gradients_alone.cuh).
#pragma once

#include "attn/params.cuh"
#include "attn/physical_row.cuh"
#include "attn/rows.cuh"
#include "attn/score_rule.cuh"
#include "attn/sequence.cuh"
#include "portable/gradients_alone.cuh"
#include "target/target.cuh"

namespace gradients_alone {

// Calls visit(row, q, k) for each of a wave's rows of queries or keys that belong to a sequence: every `waves`-th of
// the physical rows, with where the queries and keys of its sequence lie.
template <class Visit>
DEVICE void each_row(const ForwardParams& f, const Side& side, int64 wave, int64 waves, const Visit& visit) {
  const int64 rows = (side.start.data == nullptr ? f.batch : 1) * side.rows;
#pragma unroll 1
  for (int64 index = wave; index < rows; index += waves) {
    const PhysicalRow own = physical_row<true>(side, f.batch, index);
    if (own.logical) visit(own, span_of(f.q_side, own.sequence), span_of(f.k_side, own.sequence));
  }
}

// Rows of dk and dv of key j of a sequence and kv head.
DEVICE void rewrite_key(const BackwardParams& p, int sequence, int kv_head, const Span& q, const Span& k, int j,
                        int lane) {
  Element* const dk = row_at<Element>(p.dk, p.dk_strides, sequence, k.start + j, kv_head);
  Element* const dv = row_at<Element>(p.dv, p.dv_strides, sequence, k.start + j, kv_head);
  rewrite_gradient<true>(p, sequence, kv_head, q, k, j, dk, {0, config::kHeadDim}, lane);
  rewrite_gradient<false>(p, sequence, kv_head, q, k, j, dv, {0, config::kHeadDimV}, lane);
}

// Rows of dk and dv of a sequence and kv head, and rows of dq of its query heads, by all waves of a block.
DEVICE void rewrite_sequence(const BackwardParams& p, int sequence, int kv_head, const Span& q, const Span& k, int wave,
                             int waves, int lane) {
  const int group = target::wave_uniform(p.forward.nheads_q / p.forward.nheads_kv);
#pragma unroll 1
  for (int j = wave; j < target::wave_uniform(k.length); j += waves) {
    rewrite_key(p, sequence, kv_head, q, k, j, lane);
  }
#pragma unroll 1
  for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
    const Pairs pairs(p, sequence, head, q, k);
#pragma unroll 1
    for (int i = wave; i < target::wave_uniform(q.length); i += waves) {
      Element* const dq = row_at<Element>(p.dq, p.dq_strides, sequence, q.start + i, head);
      rewrite_query(pairs, i, dq, {0, config::kHeadDim}, lane);
    }
  }
}

// Elements of dbias, each by a wave: the sum over all scores that share it.
DEVICE void rewrite_bias(const BackwardParams& p, int64 wave, int64 waves, int lane) {
  const ForwardParams& f = p.forward;
  const BiasGradient& d = p.dbias;
  const int64 elements = int64(f.bias.rows) * f.bias.keys * d.heads * d.batches;
#pragma unroll 1
  for (int64 n = wave; n < elements; n += waves) {
    const int64 i = n / f.bias.keys % f.bias.rows, j = n % f.bias.keys, entry = n / f.bias.keys / f.bias.rows;
    const int64 batch = entry / d.heads, head = entry % d.heads;
    BiasElement* const own =
        static_cast<BiasElement*>(d.data) + batch * d.batch + head * d.head + i * d.row + j * d.key;
    const float before = target::to_float(*own);
    if (!target::wave_any(before != before)) continue;
    float sum = 0.0f;
#pragma unroll 1
    for (int64 shared = 0; shared < (d.batches == 1 ? f.batch : 1) * int64(f.bias.group); shared++) {
      if (target::wave_any(sum != sum)) break;  // no more terms change a NaN
      const int sequence = static_cast<int>(batch + shared / f.bias.group);
      const int own_head = static_cast<int>(head * f.bias.group + shared % f.bias.group);
      const Span q = span_of(f.q_side, sequence), k = span_of(f.k_side, sequence);
      const Pairs pairs(p, sequence, own_head, q, k);
      // A bias of one row or one key is that of all rows or keys.
      const int64 keys = f.bias.keys == 1 ? k.length : 1, scores = keys * (f.bias.rows == 1 ? q.length : 1);
#pragma unroll 1
      for (int64 m = lane; m < scores && sum == sum; m += target::kWave) {
        const int row = static_cast<int>(i + m / keys), key = static_cast<int>(j + m % keys);
        Pair pair;
        if (row < q.length && key < k.length && pairs.find(row, key, pair)) sum += pair.of_score;
      }
    }
    target::wave_sync();
    UNROLL for (int mask = 1; mask < target::kWave; mask *= 2) sum += target::shuffle_xor(sum, mask);
    if (lane == 0) *own = target::from_float<BiasElement>(sum);
  }
}

// kQueries: dq too. Called by all lanes of `waves` waves.
template <bool kQueries>
DEVICE void rewrite_gradients(const BackwardParams& p, int64 wave, int64 waves, int lane) {
  const ForwardParams& f = p.forward;
  if constexpr (kQueries) {
    each_row(f, f.q_side, wave, waves, [&](const PhysicalRow& own, const Span& q, const Span& k) {
#pragma unroll 1
      for (int head = 0; head < f.nheads_q; head++) {
        Element* const dq = row_at<Element>(p.dq, p.dq_strides, own.batch, own.row, head);
        rewrite_query(Pairs(p, own.sequence, head, q, k), own.at, dq, {0, config::kHeadDim}, lane);
      }
    });
  }
  each_row(f, f.k_side, wave, waves, [&](const PhysicalRow& own, const Span& q, const Span& k) {
#pragma unroll 1
    for (int head = 0; head < f.nheads_kv; head++) rewrite_key(p, own.sequence, head, q, k, own.at, lane);
  });
  if constexpr (config::kBias > 0) {
    if (p.dbias.data != nullptr) rewrite_bias(p, wave, waves, lane);
  }
}

}  // namespace gradients_alone
