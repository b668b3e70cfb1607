// How q . k becomes a score, for one query head of one sequence: softcap, score function, bias and ALiBi. Constants of
// the configuration switch each step, and a step that is off generates no code.
//
//   s = scale * (q . k);  s = softcap * tanh(s / softcap);  s = score_mod(s);  s += bias;
//   s -= slope * |i + offset - j|
//
// This file has scale, softcap and score_mod. Bias and ALiBi are not added to scores, but to the exponents that scores
// become (attn/added_scores.cuh), or to the products. The same holds for a "line": what a score_mod adds to the score,
// if that grows by the same step from key to key. Elements of hidden keys are computed like others, and masked
// afterwards.
#pragma once

#include "attn/params.cuh"
#include "attn/score_position.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"
#include "tile/either.cuh"

DEVICE float per_head(const PerHead& numbers, int sequence, int head) {
  const int64 at = sequence * numbers.batch + head * numbers.head;
  if (numbers.kind == 0) return static_cast<const float*>(numbers.data)[at];
  if (numbers.kind == 1) return target::to_float(static_cast<const float16*>(numbers.data)[at]);
  return target::to_float(static_cast<const bfloat16*>(numbers.data)[at]);
}

// The scale of float8 keys, or of float8 values, for a query head.
DEVICE float kv_factor(const KvScale& scale, const ForwardParams& p, int head) {
  return scale.data == nullptr ? scale.number : scale.data[head / (p.nheads_q / p.nheads_kv) * scale.head];
}

// An element of a bias, whose size is config::kBias.
using BiasElement = Either<config::kBias == 4, float, config::Element>::Type;

// Stands for config::ScoreMod where there is no score function.
struct NoScoreMod {
  template <class P>
  DEVICE NoScoreMod(const ScorePosition&, const P&) {}
};

struct ScoreRule {
  using Mod = typename Either<config::kScoreMod, config::ScoreMod, NoScoreMod>::Type;
  // Whether the score function adds a line along the keys of a row (see above).
  static constexpr bool kLine = config::kScoreMod && config::kModLine;
  // Whether the score function is called for every score.
  static constexpr bool kModifies = config::kScoreMod && !kLine;
  // Whether transform_scores() has work: a score is more than its scaled product and an addend.
  static constexpr bool kTransforms = config::kSoftcap || kModifies;
  // Whether bias, ALiBi or a line is added.
  static constexpr bool kAdds = config::kBias > 0 || config::kAlibi || kLine;
  // Whether the softcap is applied to unscaled products, which are then still to be scaled: see cap_products().
  static constexpr bool kCapsUnscaled = config::kSoftcap && !kModifies && sizeof(config::Element) == 2;
  // Whether transform_scores() gives scores in natural units. Else the scale is still to be applied.
  static constexpr bool kGivesScaledScores = kTransforms && !kCapsUnscaled;
  // Whether the derivative of a score with respect to its scaled product may differ from 1.
  static constexpr bool kHasDerivative = kTransforms;

  const ForwardParams& p;
  int sequence, head, len_q, len_k, offset;
  int first_query, first_key;  // positions of the first query and the first key in the whole sequence
  float slope;                 // of ALiBi
  float key_factor;            // the scale of float8 keys
  Mod mod;

  DEVICE ScoreRule(const ForwardParams& p, int sequence, int head, int len_q, int len_k, int offset)
      : p(p),
        sequence(sequence),
        head(head),
        len_q(len_q),
        len_k(len_k),
        offset(offset),
        first_query(position_of<config::kPositions>(p.q_side, sequence)),
        first_key(position_of<config::kPositions>(p.k_side, sequence)),
        mod(position(0, 0), p) {
    if constexpr (config::kAlibi) slope = per_head(p.alibi_slopes, sequence, head);
    if constexpr (config::kFloat8) key_factor = kv_factor(p.k_scale, p, head);
  }

  // The interface of RowRules (attn/row_rules.cuh), for a tile whose rows are all of this head: the rule of a row, and
  // the query of a row.
  DEVICE const ScoreRule& of(int, int) const { return *this; }
  DEVICE int query(int row) const { return row; }

  // The factor from products with keys as they are stored to scaled products.
  DEVICE float scale() const {
    if constexpr (config::kFloat8) return p.scores.scale * key_factor;
    return p.scores.scale;
  }

  // Applies the softcap to a scaled product: softcap * tanh(s / softcap).
  //
  // For 16-bit elements tanh is made of exp2. The error is about 2^-23 of the softcap, below the rounding error of a
  // product of 16-bit elements. float32 uses the target's tanh, to be as exact as that.
  DEVICE float capped(float s) const {
    if constexpr (!config::kSoftcap) return s;
    const float cap = p.scores.softcap;
    if constexpr (sizeof(config::Element) == 4) return cap * target::tanh(s / cap);
    constexpr float k2Log2E = 2.8853900817779268f;
    const float e = target::exp2(s * (k2Log2E * target::reciprocal(cap)));
    return fmaf(-2.0f * cap, target::reciprocal(e + 1.0f), cap);
  }

  DEVICE ScorePosition position(int i, int j, int i_static = 0, int j_static = 0) const {
    return {sequence, head,    head / (p.nheads_q / p.nheads_kv), first_query + i, first_key + j, len_q, len_k,
            i_static, j_static};
  }
  // Applies the score function to what capped() returned. M is Mod: a template parameter, since NoScoreMod has no
  // value() that could be compiled.
  template <class M = Mod>
  DEVICE float modified(float s, int i, int j, int i_static, int j_static) const {
    if constexpr (!kModifies)
      return s;
    else
      return static_cast<const M&>(mod).value(s, position(i, j, i_static, j_static), p);
  }
  // The line of query i: what is added at key j.
  template <class M = Mod>
  DEVICE float added(int i, int j) const {
    return static_cast<const M&>(mod).added(position(i, j), p);
  }
  // By how much the line of query i grows from key to key.
  template <class M = Mod>
  DEVICE float step(int i) const {
    return static_cast<const M&>(mod).step(position(i, 0), p);
  }
  // By how much the line grows from query to query, where step() is the same for all queries.
  template <class M = Mod>
  DEVICE float row_step() const {
    return static_cast<const M&>(mod).row_step(position(0, 0), p);
  }

  // The derivative of the modified score with respect to the scaled product. capped: what capped() returned.
  template <class M = Mod>
  DEVICE float derivative(float capped, int i, int j) const {
    float d = 1.0f;
    if constexpr (kModifies) d = static_cast<const M&>(mod).derivative(capped, position(i, j), p);
    if constexpr (config::kSoftcap) {
      const float cap = p.scores.softcap;
      const float t = sizeof(config::Element) == 4 ? capped / cap : capped * target::reciprocal(cap);
      d *= fmaf(-t, t, 1.0f);
    }
    return d;
  }
};

// Applies the softcap to unscaled products, and leaves them unscaled: cap / scale * tanh(scale / cap * product).
//
// Most tiles have only small scores: |x| <= 3 / 4, where x = scale / cap * product. There tanh(x) / x is a polynomial
// in x^2, which leaves the unit for exponentials to the softmax. Its coefficients minimise the largest error of the
// resulting tanh(x), which is below 2e-7.
template <class C, int kRowBlocks, int kColumnBlocks>
DEVICE void cap_products(C (&s)[kRowBlocks][kColumnBlocks], const ScoreRule& rule) {
  constexpr float kLargest = 0.75f;
  constexpr float kFactors[5] = {0.99999723f, -0.33323084f, 0.13226159f, -0.04928242f, 0.01232067f};
  const float scale = rule.scale() * target::reciprocal(rule.p.scores.softcap);
  const float square = scale * scale;
  const float end = kLargest * kLargest * target::reciprocal(square);
  float largest = 0.0f;
  UNROLL for (int m = 0; m < kRowBlocks; m++) {
    UNROLL for (int n = 0; n < kColumnBlocks; n++) {
      UNROLL for (int e = 0; e < C::kElements; e++) largest = fmaxf(largest, fabsf(s[m][n].x[e]));
    }
  }
  if (target::wave_any(!(largest * largest <= end))) {
    constexpr float k2Log2E = 2.8853900817779268f;
    const float unit = target::reciprocal(scale);
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int n = 0; n < kColumnBlocks; n++) {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          float& x = s[m][n].x[e];
          const float power = target::exp2(x * (k2Log2E * scale));
          x = fmaf(-2.0f * unit, target::reciprocal(power + 1.0f), unit);
        }
      }
    }
    return;
  }
  float factors[5];
  factors[0] = kFactors[0];
  float power = square;
  UNROLL for (int n = 1; n < 5; n++) {
    factors[n] = kFactors[n] * power;
    power *= square;
  }
  UNROLL for (int m = 0; m < kRowBlocks; m++) {
    UNROLL for (int n = 0; n < kColumnBlocks; n++) {
      UNROLL for (int e = 0; e < C::kElements; e++) {
        float& x = s[m][n].x[e];
        const float y = x * x;
        x *= fmaf(fmaf(fmaf(fmaf(factors[4], y, factors[3]), y, factors[2]), y, factors[1]), y, factors[0]);
      }
    }
  }
}

// Applies softcap and score function to a tile of products whose rows are queries; what is added to scores comes later.
// rules: a ScoreRule or RowRules. visit(m, n, e, i, j, capped): called for each element, with its query i, its key j
// and its scaled score between softcap and score function.
template <class C, int kRowBlocks, int kKeyBlocks, class Rules, class Visit>
DEVICE void transform_scores(C (&s)[kRowBlocks][kKeyBlocks], const Rules& rules, int first_row, int first_key, int lane,
                             const Visit& visit) {
  const float scale = rules.scale();
  if constexpr (ScoreRule::kCapsUnscaled) cap_products(s, rules.of(0, 0));
  UNROLL for (int m = 0; m < kRowBlocks; m++) {
    UNROLL for (int n = 0; n < kKeyBlocks; n++) {
      UNROLL for (int e = 0; e < C::kElements; e++) {
        const ScoreRule& rule = rules.of(m, C::slot(e));
        const int i = rules.query(first_row + m * C::kRows + C::row(lane, C::slot(e)));
        const int j = first_key + n * 16 + C::column(lane, e);
        float& x = s[m][n].x[e];
        if constexpr (ScoreRule::kCapsUnscaled) {
          visit(m, n, e, i, j, x * scale);
        } else {
          x = rule.capped(x * scale);
          visit(m, n, e, i, j, x);
          x = rule.modified(x, i, j, 0, n * 16 + C::column(0, e));
        }
      }
    }
  }
}
