// The steps between Q K^T and the softmax for a tile whose rows are queries: finish_scores(). For a tile whose rows are
// keys, as the backward has them, attn/scores_of_keys.cuh is the counterpart. Whatever else is to change a score or
// hide a key belongs in both.
//
// All functions work on a wave's accumulators. first_row and first_key are the query and the key of the accumulators'
// first element. Other indices are those of attn/softmax.cuh.
#pragma once

#include "attn/added_scores.cuh"
#include "attn/exponent.cuh"
#include "attn/score_rule.cuh"
#include "attn/visible.cuh"
#include "attn/visit.cuh"
#include "target/target.cuh"
#include "tile/either.cuh"

// The `finish` of finish_scores() for a forward. Its softmax includes bias, ALiBi and lines itself, and scales scores
// unless kScaleFirst.
template <bool kScaleFirst>
struct SoftmaxScore {
  float scale;

  DEVICE static float masked() { return -target::infinity(); }
  // One natural unit of a score, in units of what operator() returns.
  DEVICE float unit() const { return kScaleFirst || ScoreRule::kGivesScaledScores ? 1.0f : target::reciprocal(scale); }
  template <class Added>
  DEVICE float operator()(float product, int, int, int, const Added&) const {
    return kScaleFirst && !ScoreRule::kGivesScaledScores ? product * scale : product;
  }
};

// Recomputes a probability from a score and the lse of its row, for the backward. In float32 the lse is subtracted
// before the change to base 2. This keeps the digits that a large score and a large lse share, for one more
// instruction.
//
// An lse of -inf gives a probability of inf. Such a row sees no key, so its elements are masked afterwards. Where
// scores themselves may be -inf, the caller must pass such an lse as inf.
//
// kShift: probabilities are multiplied by 2^kShift.
template <class T, int kShift = 0>
struct Probability {
  static constexpr bool kNatural = sizeof(T) == 4 || Exponent::kNatural;
  using Unit = typename Either<kNatural, Natural, Log2>::Type;

  float scale;  // turns the argument of operator() into Unit

  // scale: turns the argument of operator() into a score; 1 where the argument is a finished score.
  DEVICE explicit Probability(float scale) : scale(scale * Unit::kUnit) {}
  DEVICE static float masked() { return 0.0f; }
  // The part of an exponent that all keys of a row share: minus the lse, and kShift where Unit is base 2. power()
  // applies kShift to natural exponents.
  DEVICE static float start(float lse) {
    if constexpr (kShift != 0 && !kNatural) return fmaf(-lse, Unit::kUnit, float(kShift));
    return -lse * Unit::kUnit;
  }
  // The same, plus x in Unit.
  DEVICE static float start(float lse, float x) { return fmaf(-lse, Unit::kUnit, kNatural ? x : x + kShift); }
  DEVICE static float power(float exponent) {
    if constexpr (kShift != 0 && kNatural) return target::exp2(fmaf(exponent, Log2::kUnit, float(kShift)));
    return target::exp2(kNatural ? exponent * Log2::kUnit : exponent);
  }
  DEVICE float operator()(float product, float lse) const { return power(fmaf(product, scale, start(lse))); }
};
// Probability as the `finish` of a tile whose rows are queries, with the lse of each of the lane's rows.
template <class T, int kRowBlocks, int kSlots>
struct RowProbability : Probability<T> {
  using typename Probability<T>::Unit;
  float lse[kRowBlocks][kSlots];  // set by set(): inf instead of -inf where scores may be -inf

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

// The keys that a row of a tile does not see: those beyond `right`, and those before `left` unless they are before
// `sink`. All limits count from first_key. The column of an element is a compile-time constant, so each limit costs one
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

// Sets the elements of keys that their row does not see to `value`. The edges are handled one after the other, since
// few tiles have both. hidden(m, n, e): called for each such element.
template <class Visible, class C, int kRowBlocks, int kKeyBlocks, class Hidden>
DEVICE void mask_scores(C (&s)[kRowBlocks][kKeyBlocks], float value, const Visible& visible, const Edges& edges,
                        int first_row, int first_key, int lane, const Hidden& hidden) {
  const auto replace = [&](const auto& hides) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const MaskedKeys<Visible> masked_keys(visible, first_row + m * C::kRows + C::row(lane, slot),
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

// All steps for key tile number n of `keys`, in their order: softcap and score function, `finish`, steep lines, and the
// mask of visible keys. finish(x, m, n, e, added): what an element becomes where its key is seen; x is the product, or
// what transform_scores() made of it. A hidden element becomes Finish::masked(), and its bias 0. added: AddedScores.
// rules, visit: see transform_scores().
template <class C, int kRowBlocks, int kKeyBlocks, class Rules, class Added, class Finish, class Keys,
          class Visit = NoCallback>
DEVICE void finish_scores(C (&s)[kRowBlocks][kKeyBlocks], const Rules& rules, Added& added, const Finish& finish,
                          const Keys& keys, int n, int first_row, int lane, const Visit& visit = Visit{}) {
  if constexpr (ScoreRule::kTransforms) transform_scores(s, rules, first_row, keys.first_key(n), lane, visit);
  UNROLL for (int m = 0; m < kRowBlocks; m++) {
    UNROLL for (int b = 0; b < kKeyBlocks; b++) {
      UNROLL for (int e = 0; e < C::kElements; e++) s[m][b].x[e] = finish(s[m][b].x[e], m, b, e, added);
    }
  }
  if constexpr (ScoreRule::kLine) added.add_line_per_score(s, rules, finish.unit(), first_row, keys.first_key(n), lane);
  mask_scores(s, Finish::masked(), keys.visible, keys.edges(n), first_row, keys.first_key(n), lane,
              added.bias_clearer());
}
