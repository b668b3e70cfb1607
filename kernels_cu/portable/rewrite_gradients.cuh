// Gradients that have a NaN, all of a call or those of a sequence, computed again without what is hidden
// (portable/gradients_alone.cuh).
#pragma once

#include "attn/params.cuh"
#include "attn/physical_row.cuh"
#include "attn/rows.cuh"
#include "attn/sequence.cuh"
#include "portable/gradients_alone.cuh"
#include "target/target.cuh"

namespace gradients_alone {

// Physical rows of an array, padding among them.
DEVICE int64 physical_rows(const ForwardParams& f, const Side& side) {
  return (side.start.data == nullptr ? f.batch : 1) * side.rows;
}

// Rows of dk and dv of a sequence and kv head, and rows of dq of its query heads, by all waves of a block.
DEVICE void rewrite_sequence(const BackwardParams& p, int sequence, int kv_head, const Span& q, const Span& k, int wave,
                             int waves, int lane) {
  const int group = target::wave_uniform(p.forward.nheads_q / p.forward.nheads_kv);
#pragma unroll 1
  for (int j = wave; j < target::wave_uniform(k.length); j += waves) {
    Element* const dk = row_at<Element>(p.dk, p.dk_strides, sequence, k.start + j, kv_head);
    Element* const dv = row_at<Element>(p.dv, p.dv_strides, sequence, k.start + j, kv_head);
    rewrite_key<true>(p, sequence, kv_head, q, k, j, dk, {0, config::kHeadDim}, lane);
    rewrite_key<false>(p, sequence, kv_head, q, k, j, dv, {0, config::kHeadDimV}, lane);
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

// Rows of dk and dv of all sequences.
DEVICE void rewrite_keys(const BackwardParams& p, int64 wave, int64 waves, int lane) {
  const ForwardParams& f = p.forward;
#pragma unroll 1
  for (int64 index = wave; index < physical_rows(f, f.k_side); index += waves) {
    const PhysicalRow own = physical_row<true>(f.k_side, f.batch, index);
    if (!own.logical) continue;
    const Span q = span_of(f.q_side, own.sequence), k = span_of(f.k_side, own.sequence);
#pragma unroll 1
    for (int head = 0; head < f.nheads_kv; head++) {
      Element* const dk = row_at<Element>(p.dk, p.dk_strides, own.batch, own.row, head);
      Element* const dv = row_at<Element>(p.dv, p.dv_strides, own.batch, own.row, head);
      rewrite_key<true>(p, own.sequence, head, q, k, own.at, dk, {0, config::kHeadDim}, lane);
      rewrite_key<false>(p, own.sequence, head, q, k, own.at, dv, {0, config::kHeadDimV}, lane);
    }
  }
}

// Rows of dq of all sequences.
DEVICE void rewrite_queries(const BackwardParams& p, int64 wave, int64 waves, int lane) {
  const ForwardParams& f = p.forward;
#pragma unroll 1
  for (int64 index = wave; index < physical_rows(f, f.q_side); index += waves) {
    const PhysicalRow own = physical_row<true>(f.q_side, f.batch, index);
    if (!own.logical) continue;
    const Span q = span_of(f.q_side, own.sequence), k = span_of(f.k_side, own.sequence);
#pragma unroll 1
    for (int head = 0; head < f.nheads_q; head++) {
      const Pairs pairs(p, own.sequence, head, q, k);
      Element* const dq = row_at<Element>(p.dq, p.dq_strides, own.batch, own.row, head);
      rewrite_query(pairs, own.at, dq, {0, config::kHeadDim}, lane);
    }
  }
}

// Elements of dbias, each by a wave: the sum over all scores that share it.
DEVICE void rewrite_bias(const BackwardParams& p, int64 wave, int64 waves, int lane) {
  using Number = typename Either<config::kBias == 4, float, Element>::Type;
  const ForwardParams& f = p.forward;
  const BiasGradient& d = p.dbias;
  const int64 elements = int64(f.bias.rows) * f.bias.keys * d.heads * d.batches;
#pragma unroll 1
  for (int64 n = wave; n < elements; n += waves) {
    const int64 i = n / f.bias.keys % f.bias.rows, j = n % f.bias.keys, entry = n / f.bias.keys / f.bias.rows;
    const int64 batch = entry / d.heads, head = entry % d.heads;
    Number* const own = static_cast<Number*>(d.data) + batch * d.batch + head * d.head + i * d.row + j * d.key;
    const float before = target::to_float(*own);
    if (!target::wave_any(before != before)) continue;
    float sum = 0.0f;
#pragma unroll 1
    for (int64 shared = 0; shared < (d.batches == 1 ? f.batch : 1) * int64(f.bias.group); shared++) {
      const int sequence = static_cast<int>(batch + shared / f.bias.group);
      const int own_head = static_cast<int>(head * f.bias.group + shared % f.bias.group);
      const Span q = span_of(f.q_side, sequence), k = span_of(f.k_side, sequence);
      const Pairs pairs(p, sequence, own_head, q, k);
      // A bias of one row or one key is that of all rows or keys.
      const int64 keys = f.bias.keys == 1 ? k.length : 1, scores = keys * (f.bias.rows == 1 ? q.length : 1);
#pragma unroll 1
      for (int64 m = lane; m < scores; m += target::kWave) {
        const int row = static_cast<int>(i + m / keys), key = static_cast<int>(j + m % keys);
        Pair pair;
        if (row < q.length && key < k.length && pairs.find(row, key, pair)) sum += pair.of_score;
      }
    }
    target::wave_sync();
    UNROLL for (int mask = 1; mask < target::kWave; mask *= 2) sum += target::shuffle_xor(sum, mask);
    if (lane == 0) *own = target::from_float<Number>(sum);
  }
}

// kQueries: dq too. Called by all lanes of `waves` waves.
template <bool kQueries>
DEVICE void rewrite_gradients(const BackwardParams& p, int64 wave, int64 waves, int lane) {
  if constexpr (kQueries) rewrite_queries(p, wave, waves, lane);
  rewrite_keys(p, wave, waves, lane);
  if constexpr (config::kBias > 0) {
    if (p.dbias.data != nullptr) rewrite_bias(p, wave, waves, lane);
  }
}

}  // namespace gradients_alone
