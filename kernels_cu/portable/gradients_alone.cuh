// Gradients that are NaN, computed again without what is hidden (attn/alone.cuh), for the kernels of the backward: rows
// of dq, dk and dv. Each kernel looks at what it stores, and has rows with a NaN computed again when all is in memory.
#pragma once

#include "attn/alone.cuh"
#include "attn/params.cuh"
#include "attn/rows.cuh"
#include "attn/sequence.cuh"
#include "portable/row_delta.cuh"
#include "target/target.cuh"

namespace gradients_alone {

using config::Element;

// What a query and a key that it sees give: the factor of dout in dv, the gradient of the score, and the factor of q in
// dk and of k in dq.
struct Pair {
  float of_dout, of_score, of_operand;
};

// The queries of one head of a sequence, and the keys of its kv head, pair by pair.
struct Pairs {
  const BackwardParams& p;
  ScoresAlone scores;
  StridedRows<const Element> q, out, dout, k, v;
  const float* lse;  // of the first query
  int64 first;       // of which this is the index in arrays like lse

  DEVICE Pairs(const BackwardParams& p, int sequence, int head, const Span& q_span, const Span& k_span)
      : p(p),
        scores(p.forward, sequence, head, q_span.length, k_span.length),
        q(rows_of<const Element>(p.forward.q, p.forward.q_strides, sequence, q_span, head)),
        out(rows_of<const Element>(p.forward.out, p.forward.out_strides, sequence, q_span, head)),
        dout(rows_of<const Element>(p.dout, p.dout_strides, sequence, q_span, head)),
        k(rows_of<const Element>(p.forward.k, p.forward.k_strides, sequence, k_span, kv_head(p, head))),
        v(rows_of<const Element>(p.forward.v, p.forward.v_strides, sequence, k_span, kv_head(p, head))) {
    first = sequence * p.forward.lse_batch + head * p.forward.lse_head + q_span.start;
    lse = p.forward.lse + first;
  }
  DEVICE static int kv_head(const BackwardParams& p, int head) {
    return head / (p.forward.nheads_q / p.forward.nheads_kv);
  }

  // row_delta of query i. A main kernel that has made it itself (kDeltaRows) has not kept it.
  DEVICE float delta(int i) const {
    if constexpr (config::kDeltaRows == 0) return p.row_delta[first + i];
    const float dot = ScoresAlone::dot<config::kHeadDimV>(dout.from(i).first, out.from(i).first);
    return row_delta::Terms(p, first + i).delta(dot);
  }

  // Whether query i sees key j. If so, `pair` is what they give.
  DEVICE bool find(int i, int j, Pair& pair) const {
    pair = {0.0f, 0.0f, 0.0f};
    if (!scores.sees(i, j) || lse[i] == -target::infinity()) return false;
    const float capped = scores.capped(q.from(i).first, k.from(j).first), score = scores.score(capped, i, j);
    if (score == -target::infinity()) return false;
    const float probability = target::exp(score - lse[i]);
    bool kept = true;
    if constexpr (config::kDropout) kept = scores.dropout.keeps_one(i, j);
    const float factor = config::kDropout ? p.forward.dropout.factor : 1.0f;
    const float dp = ScoresAlone::dot<config::kHeadDimV>(dout.from(i).first, v.from(j).first);
    const float of_score = probability * ((kept ? dp * factor : 0.0f) + delta(i));
    float of_product = of_score;
    if constexpr (ScoreRule::kHasDerivative) of_product *= scores.rule.derivative(capped, i, j);
    pair = {kept ? probability * factor : 0.0f, of_score, of_product * p.forward.scores.scale};
    return true;
  }
};

// A part of a row: columns [begin, end). The wave that calls has stored them, and reads no others.
struct Columns {
  int begin, end;

  DEVICE float read(const Element* row, int column) const {
    return column >= begin && column < end ? target::to_float(row[column]) : 0.0f;
  }
};

// Computes NaN columns of row i of dq again. They stay NaN where a key that the row sees makes them so. Called by all
// lanes of a wave. dq: the row, complete for all lanes.
DEVICE void rewrite_query(const Pairs& pairs, int i, Element* dq, const Columns& columns, int lane) {
  // Then NaN is not of what is hidden: the query is NaN itself, or its dout, or what it sees.
  const float statistics = pairs.lse[i] + pairs.delta(i);
  if (target::wave_any(statistics != statistics)) return;
  NanColumns<config::kHeadDim> sums([&](int column) { return columns.read(dq, column); }, lane);
  const int end = target::wave_uniform(pairs.scores.visible.row(i).right + 1);
#pragma unroll 1
  for (int first = 0; first < end; first += target::kWave) {
    if (!target::wave_any(sums.open())) return;
    Pair pair;
    const bool sees = pairs.find(i, first + lane, pair);
    if (!target::wave_any(sees)) continue;
    sums.add(pair.of_operand, sees, end - first, [&](int n) { return pairs.k.from(first + n).first; }, lane);
  }
  sums.store([&](int column, float x) { dq[column] = target::from_float<Element>(x); }, lane);
}

// The same of row j of dk (kOfKeys), or else of dv, of a kv head.
template <bool kOfKeys>
DEVICE void rewrite_gradient(const BackwardParams& p, int sequence, int kv_head, const Span& q_span, const Span& k_span,
                             int j, Element* gradient, const Columns& columns, int lane) {
  constexpr int kColumns = kOfKeys ? config::kHeadDim : config::kHeadDimV;
  NanColumns<kColumns> sums([&](int column) { return columns.read(gradient, column); }, lane);
  const int group = target::wave_uniform(p.forward.nheads_q / p.forward.nheads_kv);
  const int rows = target::wave_uniform(q_span.length);
#pragma unroll 1
  for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
    const Pairs pairs(p, sequence, head, q_span, k_span);
#pragma unroll 1
    for (int first = 0; first < rows; first += target::kWave) {
      if (!target::wave_any(sums.open())) return;
      const int i = first + lane;
      Pair pair{0.0f, 0.0f, 0.0f};
      const bool sees = i < rows && pairs.find(i, j, pair);
      if (!target::wave_any(sees)) continue;
      sums.add(
          kOfKeys ? pair.of_operand : pair.of_dout, sees, rows - first,
          [&](int n) { return (kOfKeys ? pairs.q : pairs.dout).from(first + n).first; }, lane);
    }
  }
  sums.store([&](int column, float x) { gradient[column] = target::from_float<Element>(x); }, lane);
}

}  // namespace gradients_alone
