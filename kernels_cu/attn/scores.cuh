// What becomes of a tile's scores between the product and the softmax where queries are rows: finish_scores. Where keys
// are rows, attn/scores_of_keys.cuh says it. Whatever else changes a score, or hides a key, belongs into both.
//
// Both go over a wave's accumulators. first_row and first_key are those of the accumulators' first element.
#pragma once

#include "attn/added_scores.cuh"
#include "attn/exponent.cuh"
#include "attn/score_rule.cuh"
#include "attn/visible.cuh"
#include "attn/visit.cuh"
#include "target/target.cuh"

// For the softmax of a forward, which adds what is added to scores, and scales them where scaling does not come first.
template <bool kScaleFirst>
struct SoftmaxScore {
  float scale;

  DEVICE static float masked() { return -target::infinity(); }
  // Of a natural unit, in those of what it gives.
  DEVICE float unit() const { return kScaleFirst || ScoreRule::kScaled ? 1.0f : target::reciprocal(scale); }
  template <class Added>
  DEVICE float operator()(float product, int, int, int, const Added&) const {
    return kScaleFirst && !ScoreRule::kScaled ? product * scale : product;
  }
};

// The probability of a score, anew. In float32 the difference is taken before the change to base 2: that keeps the
// digits which a large score and a large lse share, for one more instruction.
//
// An lse of -inf makes it inf: such a row sees no key, and what it does not see is masked afterwards. Where scores
// themselves may be -inf, such an lse must be given as inf.
//
// kShift: a power of 2 that probabilities are multiplied by.
template <class T, int kShift = 0>
struct Probability {
  static constexpr bool kNatural = sizeof(T) == 4 || Exponent::kNatural;
  using Unit = typename Either<kNatural, Natural, Log2>::Type;

  float scale;  // of the score

  // scale: of what it is called with, 1 where that is a finished score.
  DEVICE explicit Probability(float scale) : scale(scale * Unit::kUnit) {}
  DEVICE static float masked() { return 0.0f; }
  // The exponent's addend, without what is added to the score.
  DEVICE static float start(float lse) {
    if constexpr (kShift != 0 && !kNatural) return fmaf(-lse, Unit::kUnit, float(kShift));
    return -lse * Unit::kUnit;
  }
  // The same on top of x.
  DEVICE static float start(float lse, float x) { return fmaf(-lse, Unit::kUnit, kNatural ? x : x + kShift); }
  DEVICE static float power(float exponent) {
    if constexpr (kShift != 0 && kNatural) return target::exp2(fmaf(exponent, Log2::kUnit, float(kShift)));
    return target::exp2(kNatural ? exponent * Log2::kUnit : exponent);
  }
  DEVICE float operator()(float product, float lse) const { return power(fmaf(product, scale, start(lse))); }
};
// The same where queries are rows, with the lse of each.
template <class T, int kRowBlocks, int kSlots>
struct RowProbability : Probability<T> {
  using typename Probability<T>::Unit;
  float lse[kRowBlocks][kSlots];  // see set()

  using Probability<T>::Probability;
  DEVICE void set(int m, int slot, float row_lse) {
    constexpr bool kMayHide = config::kBias > 0 || config::kScoreMod;
    lse[m][slot] = kMayHide && row_lse == -target::infinity() ? target::infinity() : row_lse;
  }
  template <class Added>
  DEVICE float operator()(float product, int m, int n, int e, const Added& added) const {
    const int slot = target::Accumulator::slot(e);
    const float start = Probability<T>::start(lse[m][slot]);
    return Probability<T>::power(exponent_of<Unit>(product, this->scale, added, m, n, e, slot, start));
  }
};

// What a tile's row does not see, counted from the tile's first key: keys beyond `right`, and keys from `sink` on that
// come before `left`. An element's column in the tile is known when the kernel is compiled, so a test is one
// comparison.
template <class Visible>
struct MaskedKeys {
  int left, right, sink;

  DEVICE MaskedKeys(const Visible& visible, int row, int first_key) {
    const RowLimits limits = visible.row(row);
    left = limits.left - first_key;
    right = limits.right - first_key;
    sink = visible.sink - first_key;
  }
  DEVICE bool beyond(int j) const { return j > right; }
  DEVICE bool before(int j) const { return j < left && j >= sink; }
};

// Elements of keys that a row does not see become `value`. One edge at a time, since few tiles have both. hidden(m, n,
// e): told of each.
template <class Visible, class C, int kRowBlocks, int kKeyBlocks, class Hidden>
DEVICE void mask_scores(C (&s)[kRowBlocks][kKeyBlocks], float value, const Visible& visible, const Edges& edges,
                        int first_row, int first_key, int lane, const Hidden& hidden) {
  const auto replace = [&](const auto& hides) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const MaskedKeys<Visible> masked_keys(visible, first_row + m * 16 + C::row(lane, slot),
                                              first_key + C::column(lane, 0));
        UNROLL for (int n = 0; n < kKeyBlocks; n++) {
          UNROLL for (int i = 0; i < C::kRun; i++) {
            const int e = C::element(slot, i);
            if (!hides(masked_keys, n * 16 + C::column(0, e))) continue;
            s[m][n].x[e] = value;
            hidden(m, n, e);
          }
        }
      }
    }
  };
  if (edges.right) replace([](const MaskedKeys<Visible>& masked_keys, int j) { return masked_keys.beyond(j); });
  if (edges.left) replace([](const MaskedKeys<Visible>& masked_keys, int j) { return masked_keys.before(j); });
}

// The same where keys are rows and queries columns.
template <class Visible, class C, int kKeyBlocks, int kQueryBlocks>
DEVICE void mask_scores_of_keys(C (&s)[kKeyBlocks][kQueryBlocks], float value, const Visible& visible, int first_key,
                                int first_row, int lane) {
  UNROLL for (int m = 0; m < kKeyBlocks; m++) {
    UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
      const QueryLimits limits = visible.key(first_key + m * 16 + C::row(lane, slot));
      const int first = limits.first - first_row - C::column(lane, 0);
      const int last = limits.last - first_row - C::column(lane, 0);
      UNROLL for (int n = 0; n < kQueryBlocks; n++) {
        UNROLL for (int i = 0; i < C::kRun; i++) {
          const int e = C::element(slot, i);
          const int query = n * 16 + C::column(0, e);
          const bool before = Visible::kLimitedRight ? query < first : limits.first > 0;  // no query, or all
          if (before || (Visible::kLimitedLeft && query > last)) s[m][n].x[e] = value;
        }
      }
    }
  }
}

// Queries are rows. finish(product, row block, key block, element, added): what a product, or what the rules remake of
// it, becomes where its key is seen. Where it is hidden nothing is added to it any more. rules, visit: see
// remake_scores.
template <class C, int kRowBlocks, int kKeyBlocks, bool kRamp, class Rules, class Finish, class Keys,
          class Visit = NoVisit>
DEVICE void finish_scores(C (&s)[kRowBlocks][kKeyBlocks], const Rules& rules,
                          AddedScores<C, kRowBlocks, kKeyBlocks, kRamp>& added, const Finish& finish, const Keys& keys,
                          int n, int first_row, int lane, const Visit& visit = Visit{}) {
  if constexpr (ScoreRule::kRemakes) remake_scores(s, rules, first_row, keys.first_key(n), lane, visit);
  UNROLL for (int m = 0; m < kRowBlocks; m++) {
    UNROLL for (int b = 0; b < kKeyBlocks; b++) {
      UNROLL for (int e = 0; e < C::kElements; e++) s[m][b].x[e] = finish(s[m][b].x[e], m, b, e, added);
    }
  }
  if constexpr (ScoreRule::kLine) added.spell_out(s, rules, finish.unit(), first_row, keys.first_key(n), lane);
  mask_scores(s, Finish::masked(), keys.visible, keys.edges(n), first_row, keys.first_key(n), lane, added.forgets());
}
