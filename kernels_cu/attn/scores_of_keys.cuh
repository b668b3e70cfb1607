// The steps from K Q^T to probabilities for a tile whose rows are keys and whose columns are queries, as the portable
// backward has them: finish_scores_of_keys(). For tiles whose rows are queries, attn/scores.cuh, attn/score_rule.cuh
// and attn/added_scores.cuh have the counterparts.
#pragma once

#include "attn/added_scores.cuh"
#include "attn/exponent.cuh"
#include "attn/score_rule.cuh"
#include "attn/visible.cuh"
#include "attn/visit.cuh"
#include "target/target.cuh"
#include "tile/either.cuh"

// Applies softcap and score function to a tile of products; what is added to scores comes later. visit(m, n, e, i, j,
// capped): called for each element, with its query i, its key j and its score between softcap and score function. That
// score is scaled, but not where the softcap leaves products unscaled (kCapsUnscaled).
template <class C, int kKeyBlocks, int kQueryBlocks, class Visit>
DEVICE void transform_scores_of_keys(C (&s)[kKeyBlocks][kQueryBlocks], const ScoreRule& rule, int first_key,
                                     int first_row, int lane, const Visit& visit) {
  const float scale = rule.p.scores.scale;
  if constexpr (ScoreRule::kCapsUnscaled) cap_products(s, rule);
  UNROLL for (int m = 0; m < kKeyBlocks; m++) {
    UNROLL for (int n = 0; n < kQueryBlocks; n++) {
      UNROLL for (int e = 0; e < C::kElements; e++) {
        const int i = first_row + n * 16 + C::column(lane, e);
        const int j = first_key + m * 16 + C::row(lane, C::slot(e));
        float& x = s[m][n].x[e];
        if constexpr (ScoreRule::kCapsUnscaled) {
          visit(m, n, e, i, j, x);
        } else {
          x = rule.capped(x * scale);
          visit(m, n, e, i, j, x);
          x = rule.modified(x, i, j, n * 16 + C::column(0, e), 0);
        }
      }
    }
  }
}

// The part of an addend that depends on the key alone, for one-sided ALiBi and for the line of a score function. The
// accumulators of K Q^T start from it, so no instruction adds it. It costs products some digits. float32 has none to
// spare, so only 16-bit types use it.
struct AccumulatorStart {
  static constexpr bool kAny = ((config::kAlibi && config::kOneSided) || ScoreRule::kLine) && !ScoreRule::kTransforms &&
                               config::kBias == 0 && sizeof(config::Element) == 2;
  static_assert(kAny || !ScoreRule::kLine, "a line is known to no other code here");

  float step;  // from key to key, in units of products

  template <class Rule>  // a parameter, so that branches not taken are not compiled: not all score functions are lines
  DEVICE explicit AccumulatorStart(const Rule& rule) {
    if constexpr (ScoreRule::kLine) {
      step = is_steep(rule) ? 0.0f : rule.step(0) * target::reciprocal(scale(rule.p));
    } else if constexpr (kAny) {
      step = rule.slope * target::reciprocal(scale(rule.p));
    }
  }
  // Whether the line is too steep to start from. Its values far from its zero are so large that their rounding costs
  // digits which scores near the zero need.
  template <class Rule>
  DEVICE static bool is_steep(const Rule& rule) {
    constexpr float kSteepest = 16.0f;
    return !(fabsf(rule.step(0)) <= kSteepest && fabsf(rule.row_step()) <= kSteepest);
  }
  // The factor from products to scores. Where products start from an addend, it is kept from 0: a scale of 0 should
  // remove the products, but not the addend.
  DEVICE static float scale(const ForwardParams& p) {
    constexpr float kLeast = 0x1p-110f;
    const float scale = p.scores.scale;
    return !kAny || fabsf(scale) >= kLeast ? scale : kLeast;
  }
  // The start value of the lane's key in a slot of block m, relative to that of its first key.
  template <class C>
  DEVICE float of(int m, int slot) const {
    const int key = m * 16 + C::row(0, slot);
    return key == 0 ? 0.0f : step * static_cast<float>(key);
  }
};

// What bias, ALiBi and lines add to the scores of a tile whose rows are keys. A lane's elements of one key lie in
// different rows of the bias, so each is loaded by itself. There are two exceptions: a bias with a single row for all
// queries is loaded once for each key (kOfKeys), and a bias tile in shared memory is transposed by matrix loads
// (kFromTile).
template <class C, int kKeyBlocks, int kQueryBlocks>
struct AddedScoresOfKeys {
  using M = target::Mma<config::Element>;
  static constexpr bool kOfKeys = config::kBiasOfKeys;
  static constexpr bool kFromTile = config::kBiasChunks && sizeof(BiasElement) == 2;
  static constexpr bool kByOperands = kFromTile && M::kAccumulatorFeedsA;
  static constexpr int kBlocks = kOfKeys ? kKeyBlocks : config::kBias > 0 ? kKeyBlocks * kQueryBlocks : 1;
  using OfElements = typename Either<kByOperands, typename M::A, BiasElement[C::kElements]>::Type;

  typename Either<kOfKeys, float[C::kSlots], OfElements>::Type bias[kBlocks];
  // Of ALiBi: the distance of the lane's first query from its first key. The offsets of its other queries and keys are
  // compile-time constants.
  float first_distance;
  float slope;
  // The line at the lane's last query and first key, and its step from query to query. Under a causal mask this query
  // sees this key if any of the lane's queries sees any of its keys.
  float line, row_step;
  static constexpr int kLastColumn = (kQueryBlocks - 1) * 16 + C::column(0, C::kElements - 1);

  // tile: the bias from first_row and first_key on, in shared memory; read only with kFromTile.
  DEVICE void load(const ScoreRule& rule, const config::Element* tile, int pitch, int first_key, int first_row,
                   int lane) {
    if constexpr (kOfKeys) {
      load_bias_of_keys(rule, first_key, lane);
    } else if constexpr (kFromTile) {
      load_transposed<M>(tile, pitch, lane);
    } else if constexpr (config::kBias > 0) {
      load_bias(rule, first_key, first_row, lane);
    }
    if constexpr (config::kAlibi) {
      slope = rule.slope;
      first_distance = static_cast<float>(first_row + C::column(lane, 0) + rule.offset - first_key - C::row(lane, 0));
    }
    if constexpr (ScoreRule::kLine) {
      line = rule.added(first_row + C::column(lane, 0) + kLastColumn, first_key + C::row(lane, 0));
      row_step = rule.row_step();
    }
  }

  // Adds a line that is steep or overflows to each score by itself. begun: what the products started from, which is
  // taken out again.
  DEVICE void add_line_per_score(C (&s)[kKeyBlocks][kQueryBlocks], const ScoreRule& rule, const AccumulatorStart& begun,
                                 int first_key, int first_row, int lane) {
    if constexpr (ScoreRule::kLine) {
      constexpr float kLargest = 1e30f;
      if (!target::wave_any(AccumulatorStart::is_steep(rule) || !(fabsf(line) <= kLargest))) return;
      const float unit = target::reciprocal(AccumulatorStart::scale(rule.p));
      UNROLL for (int m = 0; m < kKeyBlocks; m++) {
        UNROLL for (int n = 0; n < kQueryBlocks; n++) {
          UNROLL for (int e = 0; e < C::kElements; e++) {
            const int i = first_row + n * 16 + C::column(lane, e), j = first_key + m * 16 + C::row(lane, C::slot(e));
            float& x = s[m][n].x[e];
            x = fmaf(rule.added(i, j), unit, x - begun.of<C>(m, C::slot(e)));
          }
        }
      }
      line = row_step = 0.0f;
    }
  }

  // The part of the exponents that all keys of a query share. column: of the query, from the lane's first one.
  template <class Finish>
  DEVICE float start(int column, float lse) const {
    if constexpr (config::kAlibi && config::kOneSided) {
      const float unit = -slope * Finish::Unit::kUnit;
      return fmaf(unit, static_cast<float>(column), Finish::start(lse, unit * first_distance));
    }
    if constexpr (ScoreRule::kLine) {
      constexpr float kUnit = Finish::Unit::kUnit;
      return fmaf(row_step * kUnit, static_cast<float>(column - kLastColumn), Finish::start(lse, line * kUnit));
    }
    return Finish::start(lse);
  }
  // The exponent of a product: the counterpart of exponent_of().
  template <class Unit>
  DEVICE float exponent(float product, float scale, int m, int n, int e, float start) const {
    if constexpr (config::kBias > 0) {
      static_assert(Unit::kUnit == 1.0f, "a bias joins natural exponents");
      return fmaf(product, scale, with_alibi<Unit>(m, n, e, element<M>(m, n, e))) + start;
    }
    return fmaf(product, scale, with_alibi<Unit>(m, n, e, start));
  }

 private:
  template <class Unit>
  DEVICE float with_alibi(int m, int n, int e, float x) const {
    if constexpr (!config::kAlibi) return x;
    const int key = m * 16 + C::row(0, C::slot(e));
    if constexpr (AccumulatorStart::kAny) return x;  // the product started from it
    // One-sided: distances of visible keys are not negative, so they need no absolute value.
    if constexpr (config::kOneSided) return fmaf(slope * Unit::kUnit, static_cast<float>(key), x);
    const float distance = first_distance + static_cast<float>(n * 16 + C::column(0, e) - key);
    return fmaf(-slope * Unit::kUnit, fmaxf(distance, -distance), x);
  }

  template <class M>  // a parameter, so that branches not taken are not compiled: not all operands become accumulators
  DEVICE void load_transposed(const config::Element* tile, int pitch, int lane) {
    UNROLL for (int m = 0; m < kKeyBlocks; m++) {
      UNROLL for (int n = 0; n < kQueryBlocks; n++) {
        auto& block = bias[m * kQueryBlocks + n];
        const config::Element* const first = tile + n * 16 * pitch + m * 16;
        if constexpr (M::kAccumulatorFeedsA) {
          block = M::load_a_columns(first, pitch, lane);
        } else {
          UNROLL for (int e = 0; e < C::kElements; e++) {
            block[e] = first[C::column(lane, e) * pitch + C::row(lane, C::slot(e))];
          }
        }
      }
    }
  }
  template <class M>
  DEVICE float element(int m, int n, int e) const {
    if constexpr (kOfKeys) {
      return bias[m][C::slot(e)];
    } else if constexpr (kFromTile && M::kAccumulatorFeedsA) {
      return M::to_accumulator(bias[m * kQueryBlocks + n]).x[e];
    } else {
      return target::to_float(bias[m * kQueryBlocks + n][e]);
    }
  }

  DEVICE void load_bias_of_keys(const ScoreRule& rule, int first_key, int lane) {
    const auto& b = rule.p.bias;
    const BiasElement* const data =
        static_cast<const BiasElement*>(b.data) + rule.sequence * b.batch + rule.head / b.group * b.head;
    UNROLL for (int m = 0; m < kKeyBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const int j = first_key + m * 16 + C::row(lane, slot);
        bias[m][slot] = target::to_float(data[(j < b.keys ? j : b.keys - 1) * b.key]);
      }
    }
  }
  DEVICE void load_bias(const ScoreRule& rule, int first_key, int first_row, int lane) {
    const auto& b = rule.p.bias;
    const BiasElement* const data =
        static_cast<const BiasElement*>(b.data) + rule.sequence * b.batch + rule.head / b.group * b.head;
    UNROLL for (int n = 0; n < kQueryBlocks; n++) {
      UNROLL for (int e = 0; e < C::kElements; e++) {
        const int i = first_row + n * 16 + C::column(lane, e);
        const BiasElement* const row = data + (i < b.rows ? i : b.rows - 1) * b.row;
        UNROLL for (int m = 0; m < kKeyBlocks; m++) {
          const int j = first_key + m * 16 + C::row(lane, C::slot(e));
          bias[m * kQueryBlocks + n][e] = row[(j < b.keys ? j : b.keys - 1) * b.key];
        }
      }
    }
  }
};

// mask_scores() of attn/scores.cuh for a tile whose rows are keys, without a test of edges.
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
          // Without a right limit a key is hidden from all queries, past the end of the sequence, or from none.
          const bool before = Visible::kLimitedRight ? query < first : limits.first > 0;
          if (before || (Visible::kLimitedLeft && query > last)) s[m][n].x[e] = value;
        }
      }
    }
  }
}

// Turns products into probabilities. lse: of the queries from first_row on. visit: see transform_scores_of_keys().
//
// Queries past the end of their sequence have an lse of inf, which makes their probabilities 0. A query whose keys are
// all hidden by scores of -inf has an lse of -inf, which is taken for inf here. Past the end, a score function or the
// bias of a ragged batch may make scores inf or NaN, for which an lse of inf is not enough: each element is then
// tested.
template <class C, int kKeyBlocks, int kQueryBlocks, class Finish, class Queries, class Visit = NoCallback>
DEVICE void finish_scores_of_keys(C (&s)[kKeyBlocks][kQueryBlocks], const ScoreRule& rule,
                                  const AddedScoresOfKeys<C, kKeyBlocks, kQueryBlocks>& added, const Finish& finish,
                                  const float* lse, const Queries& queries, int n, int first_key, int first_row,
                                  int lane, const Visit& visit = Visit{}) {
  constexpr bool kMayHide = config::kScoreMod || config::kBias > 0;  // whether a visible key may have a score of -inf
  constexpr bool kMayBeAnything = config::kScoreMod || (config::kBias > 0 && config::kRagged);
  if constexpr (ScoreRule::kTransforms) transform_scores_of_keys(s, rule, first_key, first_row, lane, visit);
  UNROLL for (int b = 0; b < kQueryBlocks; b++) {
    UNROLL for (int i = 0; i < C::kRun; i++) {
      // The query's column from the lane's first query: a compile-time constant.
      const int known = b * 16 + C::column(0, C::element(0, i));
      const int column = C::column(lane, 0) + known;
      if constexpr (ScoreRule::kTransforms || ScoreRule::kAdds) {
        using Unit = typename Finish::Unit;
        const float row_lse = lse[column];
        const bool sees = !kMayHide || fabsf(row_lse) != target::infinity();
        const float start = added.template start<Finish>(known, sees ? row_lse : target::infinity());
        UNROLL for (int m = 0; m < kKeyBlocks; m++) {
          UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
            const int e = C::element(slot, i);
            float& x = s[m][b].x[e];
            x = Finish::power(added.template exponent<Unit>(x, finish.scale, m, b, e, start));
            if (kMayBeAnything && !sees) x = Finish::masked();
          }
        }
      } else {
        UNROLL for (int m = 0; m < kKeyBlocks; m++) {
          UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
            float& x = s[m][b].x[C::element(slot, i)];
            x = finish(x, lse[column]);
          }
        }
      }
    }
  }
  if (!queries.edges(n).any()) return;
  mask_scores_of_keys(s, Finish::masked(), queries.visible, first_key, first_row, lane);
}
