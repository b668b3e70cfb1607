// What a score is besides scale * (q . k), for one query head of one sequence. Each step is a constant of the
// configuration, and what is off is no code.
//
//   s = scale * (q . k);  s = softcap * tanh(s / softcap);  s = score_mod(s);  s += bias;
//   s -= slope * |i + offset - j|
//
// The last two are added to the exponents that the scores become, and so is what a score_mod adds if that grows evenly
// from key to key. Elements of keys that nobody sees are computed like
// others, and masked afterwards.
#pragma once

#include "attn/params.cuh"
#include "attn/score_place.cuh"
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
  DEVICE NoScoreMod(const ScorePlace&, const P&) {}
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
      : p(p), sequence(sequence), head(head), len_q(len_q), len_k(len_k), offset(offset), mod(place(0, 0), p) {
    if constexpr (config::kAlibi) slope = per_head(p.alibi_slopes, sequence, head);
    if constexpr (config::kFloat8) key_factor = kv_factor(p.k_scale, p, head);
  }

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

  DEVICE ScorePlace place(int i, int j, int i_more = 0, int j_more = 0) const {
    return {sequence, head, head / (p.nheads_q / p.nheads_kv), i, j, len_q, len_k, i_more, j_more};
  }
  // Of what capped() gives. M: Mod, a parameter because it may be none that has values.
  template <class M = Mod>
  DEVICE float modified(float s, int i, int j, int i_more, int j_more) const {
    if constexpr (!kModifies)
      return s;
    else
      return static_cast<const M&>(mod).value(s, place(i, j, i_more, j_more), p);
  }
  // Of a line: what is added at a key, and by how much it grows to the next one.
  template <class M = Mod>
  DEVICE float added(int i, int j) const {
    return static_cast<const M&>(mod).added(place(i, j), p);
  }
  template <class M = Mod>
  DEVICE float step(int i) const {
    return static_cast<const M&>(mod).step(place(i, 0), p);
  }

  // The gradient of the modified score with respect to the scaled product, from what capped() gave.
  template <class M = Mod>
  DEVICE float derivative(float capped, int i, int j) const {
    float d = 1.0f;
    if constexpr (kModifies) d = static_cast<const M&>(mod).derivative(capped, place(i, j), p);
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

// Products become scores, but for what is added to them: queries are rows. visit(m, n, e, i, j, capped): told of each
// element on the way.
template <class C, int kRowBlocks, int kKeyBlocks, class Visit>
DEVICE void remake_scores(C (&s)[kRowBlocks][kKeyBlocks], const ScoreRule& rule, int first_row, int first_key, int lane,
                          const Visit& visit) {
  const float scale = rule.scale();
  if constexpr (ScoreRule::kScalesCapped) cap_products(s, rule);
  UNROLL for (int m = 0; m < kRowBlocks; m++) {
    UNROLL for (int n = 0; n < kKeyBlocks; n++) {
      UNROLL for (int e = 0; e < C::kElements; e++) {
        const int i = first_row + m * 16 + C::row(lane, C::slot(e));
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

// One of two keys side by side.
template <class T>
DEVICE T half_of(unsigned pair, bool odd) {
  T x;
  x.bits = static_cast<unsigned short>(odd ? pair >> 16 : pair);
  return x;
}

// What the bias, ALiBi and the line of a score function add to the scores of a tile of kRowBlocks x kKeyBlocks, queries
// being rows. It is read while the product is under way, and joins an exponent: one multiply-add each, whose addend it
// starts from.
template <class C, int kRowBlocks, int kKeyBlocks>
struct AddedScores {
  using Bias = typename Either<config::kBias == 4, float, config::Element>::Type;
  // Two keys of a row side by side in one access.
  static constexpr bool kPairs = config::kBiasPairs && C::kRun % 2 == 0;
  // Two keys of 16 bits in one register.
  static constexpr bool kHalves = sizeof(Bias) == 2 && C::kRun % 2 == 0;
  static constexpr int kBlocks = config::kBias > 0 ? kRowBlocks * kKeyBlocks : 1;
  struct alignas(2 * sizeof(Bias)) Pair {
    Bias x[2];
  };
  using Word = typename Either<kHalves, unsigned, Bias>::Type;

  // Of each block of 16 x 16 the lane's elements, or pairs of them, in the accumulator's order.
  Word bias[kBlocks][C::kElements / (kHalves ? 2 : 1)];
  // Of each row from the lane's first key: less the key's column, which is known when this is compiled.
  float distance[kRowBlocks][C::kSlots];
  float slope;
  // Of each row the line at the lane's first key, and its step.
  float line[kRowBlocks][C::kSlots], step[kRowBlocks][C::kSlots];
  bool straight;  // the wave's lines are computed so: see are_straight()

  // Of rows of the wave, for all tiles.
  //
  // A key's addend is that of another key and steps: it has the rounding error of the largest of the tile. Of steep
  // lines that would be more than a score may be wrong by, and one that leaves the range of numbers is none. Those are
  // added to scores one by one.
  DEVICE static bool are_straight(const ScoreRule& rule, int first_row, int lane) {
    bool even = true;
    if constexpr (ScoreRule::kLine) {
      constexpr float kSteepest = 16.0f, kLargest = 1e30f;
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
          const int i = first_row + m * 16 + C::row(lane, slot);
          const auto fits = [](float x, float limit) { return fabsf(x) <= limit; };
          even = even && fits(rule.step(i), kSteepest) && fits(rule.added(i, 0), kLargest) &&
                 fits(rule.added(i, rule.len_k - 1), kLargest);
        }
      }
      even = !target::wave_any(!even);
    }
    return even;
  }

  DEVICE void load(const ScoreRule& rule, int first_row, int first_key, int lane) {
    if constexpr (config::kBias > 0) load_bias(rule, first_row, first_key, lane);
    load_distances(rule, first_row, first_key, lane);
  }
  // The rest, where something else has filled `bias`.
  DEVICE void load_distances(const ScoreRule& rule, int first_row, int first_key, int lane) {
    if constexpr (config::kAlibi) {
      slope = rule.slope;
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
          const int i = first_row + m * 16 + C::row(lane, slot);
          distance[m][slot] = static_cast<float>(i + rule.offset - first_key - C::column(lane, 0));
        }
      }
    }
    if constexpr (ScoreRule::kLine) {
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
          const int i = first_row + m * 16 + C::row(lane, slot);
          line[m][slot] = rule.added(i, first_key + C::column(lane, 0));
          step[m][slot] = rule.step(i);
        }
      }
    }
  }

  // Where lines are not straight, scores have them from here on. unit: of a natural unit, in the scores'.
  DEVICE void spell_out(C (&s)[kRowBlocks][kKeyBlocks], const ScoreRule& rule, float unit, int first_row, int first_key,
                        int lane) {
    if constexpr (ScoreRule::kLine) {
      if (straight) return;
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int n = 0; n < kKeyBlocks; n++) {
          UNROLL for (int e = 0; e < C::kElements; e++) {
            const int i = first_row + m * 16 + C::row(lane, C::slot(e));
            s[m][n].x[e] = fmaf(rule.added(i, first_key + n * 16 + C::column(lane, e)), unit, s[m][n].x[e]);
          }
        }
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) line[m][slot] = step[m][slot] = 0.0f;
      }
    }
  }

  // Makes what is added to an element 0: a hidden one's must not be NaN. To be called with (m, n, e).
  DEVICE auto forgets() {
    return [this](int m, int n, int e) {
      if constexpr (config::kBias > 0) forget(bias[m * kKeyBlocks + n], e);
    };
  }

  // What all elements of a row have in common, on top of x. kUnit: of a natural unit, in the exponent's.
  template <class Unit>
  DEVICE float start(int m, int slot, float x) const {
    if constexpr (ScoreRule::kLine) x = fmaf(line[m][slot], Unit::kUnit, x);
    if constexpr (config::kAlibi && config::kOneSided) return fmaf(-slope * Unit::kUnit, distance[m][slot], x);
    return x;
  }
  // The largest addend of a row's elements, of lines and of ALiBi on one side alone, from that of its row.
  template <class Unit>
  DEVICE float largest(int m, int slot, float start) const {
    const float last = (kKeyBlocks - 1) * 16 + C::column(0, C::kElements - 1);
    if constexpr (ScoreRule::kLine) start = fmaf(fmaxf(step[m][slot], 0.0f) * Unit::kUnit, last, start);
    if constexpr (config::kAlibi) start = fmaf(fmaxf(slope, 0.0f) * Unit::kUnit, last, start);
    return start;
  }
  // The addend of an element's exponent, from that of its row.
  template <class Unit>
  DEVICE float addend(int m, int n, int e, float start) const {
    if constexpr (config::kBias > 0) {
      const float b = element(bias[m * kKeyBlocks + n], e);
      // A compiler leaves a multiplication by 1 where it is.
      start = Unit::kUnit == 1.0f ? b + start : fmaf(b, Unit::kUnit, start);
    }
    const float column = static_cast<float>(n * 16 + C::column(0, e));
    if constexpr (ScoreRule::kLine) start = fmaf(step[m][C::slot(e)] * Unit::kUnit, column, start);
    if constexpr (config::kAlibi) {
      if constexpr (config::kOneSided) {
        // No key beyond the diagonal is seen: the distance has no sign to lose.
        start = fmaf(slope * Unit::kUnit, column, start);
      } else {
        const float apart = distance[m][C::slot(e)] - column;
        start = fmaf(-slope * Unit::kUnit, fmaxf(apart, -apart), start);
      }
    }
    return start;
  }

 private:
  template <class Block>
  DEVICE static void forget(Block& block, int e) {
    if constexpr (kHalves) {
      block[e / 2] &= e % 2 != 0 ? 0xffffu : 0xffff0000u;
    } else {
      block[e] = Bias{};
    }
  }
  template <class Block>
  DEVICE static float element(const Block& block, int e) {
    if constexpr (kHalves) {
      return target::to_float(half_of<Bias>(block[e / 2], e % 2 != 0));
    } else {
      return target::to_float(block[e]);
    }
  }
  template <class Block>
  DEVICE static void put_pair(Block& block, int e, const Bias& even, const Bias& odd) {
    if constexpr (kHalves) {
      block[e / 2] = pair_of(even, odd);
    } else {
      block[e] = even;
      block[e + 1] = odd;
    }
  }
  template <class T>
  DEVICE static unsigned pair_of(const T& even, const T& odd) {
    return static_cast<unsigned>(even.bits) | static_cast<unsigned>(odd.bits) << 16;
  }

  DEVICE void load_bias(const ScoreRule& rule, int first_row, int first_key, int lane) {
    const auto& b = rule.p.bias;
    const Bias* const data = static_cast<const Bias*>(b.data) + rule.sequence * b.batch + rule.head / b.group * b.head;
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const int i = first_row + m * 16 + C::row(lane, slot);
        const Bias* const row = data + (i < b.rows ? i : b.rows - 1) * b.row;
        UNROLL for (int n = 0; n < kKeyBlocks; n++) {
          auto& block = bias[m * kKeyBlocks + n];
          const auto one = [&](int e) {
            const int j = first_key + n * 16 + C::column(lane, e);
            return row[(j < b.keys ? j : b.keys - 1) * b.key];
          };
          UNROLL for (int r = 0; r < C::kRun; r += C::kRun % 2 == 0 ? 2 : 1) {
            const int e = C::element(slot, r);
            if constexpr (kPairs) {
              const int j = first_key + n * 16 + C::column(lane, e);
              const Pair pair = *reinterpret_cast<const Pair*>(row + (j < b.keys ? j : b.keys - 2));
              put_pair(block, e, pair.x[0], pair.x[1]);
            } else if constexpr (C::kRun % 2 == 0) {
              put_pair(block, e, one(e), one(e + 1));
            } else {
              block[e] = one(e);
            }
          }
        }
      }
    }
  }
};

// Units of an exponent: what one natural unit is there.
struct Natural {
  static constexpr float kUnit = 1.0f;
};
struct Log2 {
  static constexpr float kUnit = 1.4426950408889634f;
};
// Of what the softmax exponentiates. Where there is a bias it is natural: the least number of a dtype, by which people
// hide keys, must not overflow, and of two such scores the difference must be 0.
struct Exponent {
  static constexpr bool kNatural = config::kBias > 0;
  static constexpr float kUnit = kNatural ? 1.0f : Log2::kUnit;

  DEVICE static float power(float x) { return target::exp2(kNatural ? x * Log2::kUnit : x); }
  // The logarithm of a sum whose terms were taken against running_max.
  DEVICE static float logarithm(float running_max, float sum) {
    constexpr float kLn2 = 0.6931471805599453f;
    if constexpr (kNatural) return fmaf(kLn2, target::log2(sum), running_max);
    return kLn2 * (running_max + target::log2(sum));
  }
};

// A product's score with what is added to it, in units of an exponent. scale: from products to these.
template <class Unit, class Added>
DEVICE float sum_of(float product, float scale, const Added& added, int m, int n, int e, int slot) {
  // An addition of -0 is none, one of 0 might change a sign.
  return fmaf(product, scale, added.template addend<Unit>(m, n, e, added.template start<Unit>(m, slot, -0.0f)));
}
// The exponent of a product: with what is added to its score, over `start`. A bias joins the score before anything is
// subtracted: beside the least number of a dtype a score is lost, and a row that has no other bias weighs all keys
// alike.
template <class Unit, class Added>
DEVICE float exponent_of(float product, float scale, const Added& added, int m, int n, int e, int slot, float start) {
  if constexpr (config::kBias > 0) return sum_of<Unit>(product, scale, added, m, n, e, slot) + start;
  return fmaf(product, scale, added.template addend<Unit>(m, n, e, added.template start<Unit>(m, slot, start)));
}
