// What a score is besides scale * (q . k), for one query head of one sequence. Each step is a constant of the
// configuration, and what is off is no code.
//
//   s = scale * (q . k);  s = softcap * tanh(s / softcap);  s = score_mod(s);  s += bias;  s -= slope * |i + offset - j|
//
// Scores are in natural units here. Elements of keys that nobody sees are computed like others, and masked afterwards.
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

struct ScoreRule {
  // Whether scores are more than scaled products.
  static constexpr bool kChanges = config::kSoftcap || config::kScoreMod || config::kBias > 0 || config::kAlibi;
  // Whether a scaled product's share in its score is another than 1.
  static constexpr bool kHasDerivative = config::kSoftcap || config::kScoreMod;

  const ForwardParams& p;
  int sequence, head, len_q, len_k, offset;
  float slope;

  DEVICE ScoreRule(const ForwardParams& p, int sequence, int head, int len_q, int len_k, int offset)
      : p(p), sequence(sequence), head(head), len_q(len_q), len_k(len_k), offset(offset) {
    if constexpr (config::kAlibi) slope = per_head(p.alibi_slopes, sequence, head);
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

  DEVICE ScorePlace place(int i, int j) const {
    return {sequence, head, head / (p.nheads_q / p.nheads_kv), i, j, len_q, len_k};
  }
  // Of what capped() gives. Mod: the generated function, a parameter because there may be none.
  template <class Mod = config::ScoreMod>
  DEVICE float modified(float s, int i, int j) const {
    if constexpr (!config::kScoreMod) return s;
    else return Mod::value(s, place(i, j), p);
  }

  // The gradient of the modified score with respect to the scaled product, from what capped() gave.
  template <class Mod = config::ScoreMod>
  DEVICE float derivative(float capped, int i, int j) const {
    float d = 1.0f;
    if constexpr (config::kScoreMod) d = Mod::derivative(capped, place(i, j), p);
    if constexpr (config::kSoftcap) {
      const float t = capped / p.scores.softcap;
      d *= fmaf(-t, t, 1.0f);
    }
    return d;
  }
};

template <bool kFirst, class A, class B>
struct Either {
  using Type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using Type = B;
};

// What the bias and ALiBi add to the scores of a tile: kRowBlocks x kKeyBlocks of them, queries being rows. The bias is
// read before the product is there, so that it is there with it.
template <class C, int kRowBlocks, int kKeyBlocks>
struct AddedScores {
  using Bias = typename Either<config::kBias == 4, float, config::Element>::Type;
  // Two keys of a row side by side in one access.
  static constexpr bool kPairs = config::kBiasPairs && C::kRun % 2 == 0;
  static constexpr int kBlocks = config::kBias > 0 ? kRowBlocks * kKeyBlocks : 1;
  struct alignas(2 * sizeof(Bias)) Pair {
    Bias x[2];
  };

  Bias bias[kBlocks][C::kElements];

  DEVICE void load(const ScoreRule& rule, int first_row, int first_key, int lane) {
    if constexpr (config::kBias > 0) {
      const auto& b = rule.p.bias;
      const Bias* const data =
          static_cast<const Bias*>(b.data) + rule.sequence * b.batch + rule.head / b.group * b.head;
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
          const int i = first_row + m * 16 + C::row(lane, slot);
          const Bias* const row = data + (i < b.rows ? i : b.rows - 1) * b.row;
          UNROLL for (int n = 0; n < kKeyBlocks; n++) {
            Bias(&block)[C::kElements] = bias[m * kKeyBlocks + n];
            UNROLL for (int r = 0; r < C::kRun; r += kPairs ? 2 : 1) {
              const int e = C::element(slot, r);
              int j = first_key + n * 16 + C::column(lane, e);
              if constexpr (kPairs) {
                j = j < b.keys ? j : b.keys - 2;
                const Pair pair = *reinterpret_cast<const Pair*>(row + j);
                block[e] = pair.x[0];
                block[C::element(slot, r + 1)] = pair.x[1];
              } else {
                block[e] = row[(j < b.keys ? j : b.keys - 1) * b.key];
              }
            }
          }
        }
      }
    }
  }
  DEVICE float at(int m, int n, int e) const { return target::to_float(bias[m * kKeyBlocks + n][e]); }
};

// Products become scores: queries are rows. visit(m, n, e, i, j, capped): told of each element on the way.
template <class C, int kRowBlocks, int kKeyBlocks, class Visit>
DEVICE void change_scores(C (&s)[kRowBlocks][kKeyBlocks], const ScoreRule& rule,
                          const AddedScores<C, kRowBlocks, kKeyBlocks>& added, int first_row, int first_key, int lane,
                          const Visit& visit) {
  const float scale = rule.p.scores.scale;
  UNROLL for (int m = 0; m < kRowBlocks; m++) {
    UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
      const int i = first_row + m * 16 + C::row(lane, slot);
      const int j0 = first_key + C::column(lane, 0);
      // The distance of the row from its first key here: less the key's column, which is known when this is compiled.
      const float distance = static_cast<float>(i + rule.offset - j0);
      UNROLL for (int n = 0; n < kKeyBlocks; n++) {
        UNROLL for (int r = 0; r < C::kRun; r++) {
          const int e = C::element(slot, r);
          const int column = n * 16 + C::column(0, e);
          float& x = s[m][n].x[e];
          x *= scale;
          if constexpr (config::kSoftcap) x = rule.capped(x);
          visit(m, n, e, i, j0 + column, x);
          if constexpr (config::kScoreMod) x = rule.modified(x, i, j0 + column);
          if constexpr (config::kBias > 0) x += added.at(m, n, e);
          if constexpr (config::kAlibi) {
            const float apart = distance - static_cast<float>(column);
            // Where no key beyond the diagonal is seen, what is seen has no sign to lose.
            x = fmaf(-rule.slope, config::kOneSided ? apart : fmaxf(apart, -apart), x);
          }
        }
      }
    }
  }
}
