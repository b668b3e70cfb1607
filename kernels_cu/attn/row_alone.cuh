// Output rows of NaN, computed again without the keys that they do not see (attn/alone.cuh), for the forwards.
#pragma once

#include "attn/alone.cuh"
#include "attn/pages.cuh"
#include "attn/params.cuh"
#include "attn/rows.cuh"
#include "attn/sequence.cuh"
#include "attn/stored_keys.cuh"
#include "target/target.cuh"

// For attend_alone() where no key is hidden but by the parameters of the call.
struct NoMoreHidden {
  DEVICE bool operator()(int) const { return false; }
};
// Columns [begin, end) of a row.
struct ColumnRange {
  int begin, end;
};

// Computes the NaN columns of row i of a head again, and its lse where that is NaN. They stay NaN where a key that the
// row sees makes them so. Called by all lanes of a wave. out: the row, complete for all lanes. q_span, k_span: of the
// sequence. hidden(j): whether a key is hidden by what ScoresAlone does not know. columns: those that the wave has
// stored, the only ones that it reads; lse is of the wave that has the first.
template <class Hidden = NoMoreHidden>
DEVICE void attend_alone(const ForwardParams& p, int sequence, int head, int i, const Span& q_span, const Span& k_span,
                         config::Element* out, const Hidden& hidden = Hidden{},
                         const ColumnRange& columns = {0, config::kHeadDimV}) {
  using Element = config::Element;
  constexpr int kWave = target::kWave;
  const int lane = target::reload_thread_index() % kWave;
  // What depends on these is not computed before the kernel's own loop.
  sequence = target::wave_uniform(sequence);
  head = target::wave_uniform(head);
  i = target::wave_uniform(i);
  const int kv_head = head / (target::wave_uniform(p.nheads_q) / p.nheads_kv);
  const Element* const q = row_at<const Element>(p.q, p.q_strides, sequence, q_span.start + i, head);
  const auto k = rows_of_keys<config::kPaged, const StoredKey>(p.k, p.k_strides, p.pages, sequence, k_span, kv_head);
  const auto v = rows_of_keys<config::kPaged, const StoredKey>(p.v, p.v_strides, p.pages, sequence, k_span, kv_head);
  const ScoresAlone scores(p, sequence, head, q_span.length, k_span.length);
  const int end = target::wave_uniform(scores.visible.row(i).right + 1);
  float* const lse = p.lse == nullptr ? nullptr : p.lse + sequence * p.lse_batch + head * p.lse_head + q_span.start + i;
  const bool nan_lse = lse != nullptr && columns.begin == 0 && *lse != *lse;

  const auto read = [&](int column) {
    return column >= columns.begin && column < columns.end ? target::to_float(out[column]) : 0.0f;
  };
  NanColumns<config::kHeadDimV> o(read, lane);
  float running_max = -target::infinity(), sum = 0.0f;
  // In turns of kWave keys: a lane has the score of one key, then columns of the values.
  for (int first = 0; first < end; first += kWave) {
    if (!target::wave_any(o.open() || nan_lse)) return;
    const int j = first + lane;
    float score = -target::infinity();
    if (scores.sees(i, j) && !hidden(j)) score = scores.score(scores.capped(q, k.from(j).address()), i, j);
    if (target::wave_any(score != score)) return;
    if (!target::wave_any(score > -target::infinity())) continue;

    float largest = fmaxf(score, running_max);
    UNROLL for (int n = kWave / 2; n > 0; n /= 2) largest = fmaxf(largest, target::shuffle_xor(largest, n));
    const float factor = target::exp(running_max - largest), weight = target::exp(score - largest);
    float total = weight;
    UNROLL for (int n = kWave / 2; n > 0; n /= 2) total += target::shuffle_xor(total, n);
    sum = fmaf(sum, factor, total);
    running_max = largest;
    o.multiply(factor);
    const float kept = config::kDropout && !scores.dropout.keeps_one(i, j) ? 0.0f : weight;
    o.add(kept, score > -target::infinity(), end - first, [&](int n) { return v.from(first + n).address(); }, lane);
  }
  if constexpr (config::kSinkLogits) {
    const float sink = per_head(p.sink_logits, sequence, head), largest = fmaxf(running_max, sink);
    if (largest > -target::infinity()) {
      const float factor = target::exp(running_max - largest);
      sum = fmaf(sum, factor, target::exp(sink - largest));
      running_max = largest;
      o.multiply(factor);
    }
  }
  const float factor = (config::kDropout ? p.dropout.factor : 1.0f) * value_factor(p, head);
  o.multiply(sum == 0.0f ? 0.0f : factor * target::reciprocal(sum));
  o.store([&](int column, float x) { out[column] = target::from_float<Element>(x); }, lane);
  target::wave_sync();  // all lanes have read lse
  if (lane == 0 && nan_lse) *lse = running_max + target::log(sum);
}
