// What a score is besides scale * (q . k), for one query head of one sequence. Each step is a constant of the
// configuration, and what is off is no code.
//
//   s = scale * (q . k);  s = softcap * tanh(s / softcap);  s = score_mod(s);  s += bias;
//   s -= slope * |i + offset - j|
//
// The last two are added to the exponents that the scores become, or to the products, and so is what a score_mod adds
// if that grows evenly from key to key. Elements of keys that nobody sees are computed like others, and masked
// afterwards.
#pragma once

#include "attn/params.cuh"
#include "attn/score_position.cuh"
#include "target/target.cuh"

DEVICE float per_head(const PerHead& numbers, int sequence, int head) {
  const int64 at = sequence * numbers.batch + head * numbers.head;
  if (numbers.kind == 0) return static_cast<const float*>(numbers.data)[at];
  if (numbers.kind == 1) return target::to_float(static_cast<const float16*>(numbers.data)[at]);
  return target::to_float(static_cast<const bfloat16*>(numbers.data)[at]);
}

// What the keys or values of a query head are multiplied with.
DEVICE float kv_factor(const KvScale& scale, const ForwardParams& p, int head) {
  return scale.data == nullptr ? scale.number : scale.data[head / (p.nheads_q / p.nheads_kv) * scale.head];
}

template <bool kFirst, class A, class B>
struct Either {
  using Type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using Type = B;
};

// Where there is no score function.
struct NoScoreMod {
  template <class P>
  DEVICE NoScoreMod(const ScorePosition&, const P&) {}
};

struct ScoreRule {
  using Mod = typename Either<config::kScoreMod, config::ScoreMod, NoScoreMod>::Type;
  // Whether the score function is called for every score, or adds a line along the keys of a row.
  static constexpr bool kLine = config::kScoreMod && config::kModLine;
  static constexpr bool kModifies = config::kScoreMod && !kLine;
  // Whether scores are made of scaled products by more than an addition, and whether something is added to them.
  static constexpr bool kRemakes = config::kSoftcap || kModifies;
  static constexpr bool kAdds = config::kBias > 0 || config::kAlibi || kLine;
  // Whether what a softcap leaves is still to be scaled, as products are.
  static constexpr bool kScalesCapped = config::kSoftcap && !kModifies && sizeof(config::Element) == 2;
  // Whether remade scores are natural units: else they are still to be scaled.
  static constexpr bool kScaled = kRemakes && !kScalesCapped;
  // Whether a scaled product's share in its score is another than 1.
  static constexpr bool kHasDerivative = kRemakes;

  const ForwardParams& p;
  int sequence, head, len_q, len_k, offset;
  float slope;
  float key_factor;
  Mod mod;

  DEVICE ScoreRule(const ForwardParams& p, int sequence, int head, int len_q, int len_k, int offset)
      : p(p), sequence(sequence), head(head), len_q(len_q), len_k(len_k), offset(offset), mod(position(0, 0), p) {
    if constexpr (config::kAlibi) slope = per_head(p.alibi_slopes, sequence, head);
    if constexpr (config::kFloat8) key_factor = kv_factor(p.k_scale, p, head);
  }

  // Of rows of a tile that are all of this head. Those of several heads have RowRules.
  DEVICE const ScoreRule& of(int, int) const { return *this; }
  DEVICE int query(int row) const { return row; }

  // Of products with keys as they are stored.
  DEVICE float scale() const {
    if constexpr (config::kFloat8) return p.scores.scale * key_factor;
    return p.scores.scale;
  }

  // What the softcap leaves of a scaled product: softcap * tanh(s / softcap).
  //
  // By exponentials: the error is some 2^-23 of the softcap, below what rounding leaves of a 16-bit product. float32 is
  // to be as exact as its own tanh.
  DEVICE float capped(float s) const {
    if constexpr (!config::kSoftcap) return s;
    const float cap = p.scores.softcap;
    if constexpr (sizeof(config::Element) == 4) return cap * target::tanh(s / cap);
    constexpr float k2Log2E = 2.8853900817779268f;
    const float e = target::exp2(s * (k2Log2E * target::reciprocal(cap)));
    return fmaf(-2.0f * cap, target::reciprocal(e + 1.0f), cap);
  }

  DEVICE ScorePosition position(int i, int j, int i_more = 0, int j_more = 0) const {
    return {sequence, head, head / (p.nheads_q / p.nheads_kv), i, j, len_q, len_k, i_more, j_more};
  }
  // Of what capped() gives. M: Mod, a parameter because it may be none that has values.
  template <class M = Mod>
  DEVICE float modified(float s, int i, int j, int i_more, int j_more) const {
    if constexpr (!kModifies)
      return s;
    else
      return static_cast<const M&>(mod).value(s, position(i, j, i_more, j_more), p);
  }
  // Of a line: what is added at a key, and by how much it grows to the next one.
  template <class M = Mod>
  DEVICE float added(int i, int j) const {
    return static_cast<const M&>(mod).added(position(i, j), p);
  }
  template <class M = Mod>
  DEVICE float step(int i) const {
    return static_cast<const M&>(mod).step(position(i, 0), p);
  }
  // To the next query, where each has the same step.
  template <class M = Mod>
  DEVICE float row_step() const {
    return static_cast<const M&>(mod).row_step(position(0, 0), p);
  }

  // The gradient of the modified score with respect to the scaled product, from what capped() gave.
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

// What a softcap leaves of products, as products: cap / scale * tanh(scale / cap * product).
//
// Most tiles have small scores alone: there tanh(x) / x is a polynomial in x^2, within 2e-7 up to |x| = 3 / 4, and the
// unit for exponentials is left to those of the softmax. (Fitted to the least largest error of the tanh.)
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

// Products become scores, but for what is added to them: queries are rows. rules: a ScoreRule or RowRules. visit(m, n,
// e, i, j, capped): told of each element on the way.
template <class C, int kRowBlocks, int kKeyBlocks, class Rules, class Visit>
DEVICE void remake_scores(C (&s)[kRowBlocks][kKeyBlocks], const Rules& rules, int first_row, int first_key, int lane,
                          const Visit& visit) {
  const float scale = rules.scale();
  if constexpr (ScoreRule::kScalesCapped) cap_products(s, rules.of(0, 0));
  UNROLL for (int m = 0; m < kRowBlocks; m++) {
    UNROLL for (int n = 0; n < kKeyBlocks; n++) {
      UNROLL for (int e = 0; e < C::kElements; e++) {
        const ScoreRule& rule = rules.of(m, C::slot(e));
        const int i = rules.query(first_row + m * 16 + C::row(lane, C::slot(e)));
        const int j = first_key + n * 16 + C::column(lane, e);
        float& x = s[m][n].x[e];
        if constexpr (ScoreRule::kScalesCapped) {
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
