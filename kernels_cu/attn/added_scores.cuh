// Addends of scores: the bias, ALiBi, and the line of a score function (attn/score_rule.cuh). They are not added to
// scores, but to the exponents that the softmax makes of them. This file is for tiles whose rows are queries;
// attn/scores_of_keys.cuh has the counterpart for tiles whose rows are keys.
#pragma once

#include "attn/score_rule.cuh"
#include "target/target.cuh"
#include "tile/either.cuh"

// One of two 16-bit elements in a register; the odd one is in its upper half.
template <class T>
DEVICE T half_of(unsigned pair, bool odd) {
  T x;
  x.bits = static_cast<unsigned short>(odd ? pair >> 16 : pair);
  return x;
}

// What bias, ALiBi and a line add to the scores of a tile of kRowBlocks x kKeyBlocks blocks whose rows are queries. It
// is loaded while Q K^T runs. The multiply-add that scales a product takes it as its addend. kRamp: what grows from the
// tile's first key on is already in the products (sm90/forward_ramp.cuh).
//
// kApart: elements that are loaded one by one have a register each. To put two of 16 bits into one waits for both.
template <class C, int kRowBlocks, int kKeyBlocks, bool kRamp = false, bool kApart = false>
struct AddedScores {
  // Whether one access loads two adjacent keys of a row.
  static constexpr bool kPairs = config::kBiasPairs && C::kRun % 2 == 0;
  // Whether one register holds two adjacent keys, of 16 bits each.
  static constexpr bool kHalves = sizeof(BiasElement) == 2 && C::kRun % 2 == 0 && (kPairs || !kApart);
  static constexpr int kBlocks = config::kBias > 0 ? kRowBlocks * kKeyBlocks : 1;
  struct alignas(2 * sizeof(BiasElement)) Pair {
    BiasElement x[2];
  };
  using Word = typename Either<kHalves, unsigned, BiasElement>::Type;

  // By 16 x 16 block: the lane's elements, or pairs of them, in the accumulator's order.
  Word bias[kBlocks][C::kElements / (kHalves ? 2 : 1)];
  // Of ALiBi, by row: the query's distance from the lane's first key, or with kRamp from the tile's first key, and the
  // slope. The distance from another key is less by that key's column, a compile-time constant.
  float distance[kRowBlocks][C::kSlots], slope[kRowBlocks][C::kSlots];
  // By row: the line at the same key, and its step from key to key.
  float line[kRowBlocks][C::kSlots], step[kRowBlocks][C::kSlots];
  bool lines_by_step;  // set by the caller to can_step_lines(): whether `line` and `step` give the addends of lines
  // With kRamp and two-sided ALiBi, set before load(): whether the tile lies wholly beyond the diagonal.
  bool tile_beyond_diagonal;

  // Whether the largest addend of a row is known without those of its elements: see largest().
  static constexpr bool kBounded =
      config::kBias == 0 && (ScoreRule::kLine || config::kAlibi) && (kRamp || config::kOneSided || !config::kAlibi);

  // Whether the lines of all rows of the wave may be computed from `line` and `step`, in all tiles. rules: a ScoreRule
  // or RowRules, here and below.
  //
  // A key's addend is then another key's addend and some steps, so it has the rounding error of the largest addend of
  // the tile. For a steep line that error is too large for a score, and a line that overflows has no steps.
  // add_line_per_score() then adds the wave's lines to each score instead.
  template <class Rules>
  DEVICE static bool can_step_lines(const Rules& rules, int first_row, int lane) {
    bool even = true;
    if constexpr (ScoreRule::kLine) {
      constexpr float kSteepest = 16.0f, kLargest = 1e30f;
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
          const ScoreRule& rule = rules.of(m, slot);
          const int i = rules.query(first_row + m * C::kRows + C::row(lane, slot));
          const auto fits = [](float x, float limit) { return fabsf(x) <= limit; };
          even = even && fits(rule.step(i), kSteepest) && fits(rule.added(i, 0), kLargest) &&
                 fits(rule.added(i, rule.len_k - 1), kLargest);
        }
      }
      even = !target::wave_any(!even);
    }
    return even;
  }

  template <class Rules>
  DEVICE void load(const Rules& rules, int first_row, int first_key, int lane) {
    if constexpr (config::kBias > 0) load_bias(rules, first_row, first_key, lane);
    load_distances(rules, first_row, first_key, lane);
  }
  // All of load() but the bias, where the caller fills `bias` itself.
  template <class Rules>
  DEVICE void load_distances(const Rules& rules, int first_row, int first_key, int lane) {
    if constexpr (config::kAlibi) {
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
          const ScoreRule& rule = rules.of(m, slot);
          const int i = rules.query(first_row + m * C::kRows + C::row(lane, slot));
          slope[m][slot] = kRamp && !config::kOneSided && tile_beyond_diagonal ? -rule.slope : rule.slope;
          distance[m][slot] = static_cast<float>(i + rule.offset - first_key - own_column(lane));
        }
      }
    }
    if constexpr (ScoreRule::kLine) {
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
          const ScoreRule& rule = rules.of(m, slot);
          const int i = rules.query(first_row + m * C::kRows + C::row(lane, slot));
          line[m][slot] = rule.added(i, first_key + own_column(lane));
          step[m][slot] = rule.step(i);
        }
      }
    }
  }

  // Unless lines_by_step, adds the lines to the scores, one by one, and sets `line` and `step` to 0. unit: one natural
  // unit, in units of the scores.
  template <class Rules>
  DEVICE void add_line_per_score(C (&s)[kRowBlocks][kKeyBlocks], const Rules& rules, float unit, int first_row,
                                 int first_key, int lane) {
    if constexpr (ScoreRule::kLine) {
      if (lines_by_step) return;
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int n = 0; n < kKeyBlocks; n++) {
          UNROLL for (int e = 0; e < C::kElements; e++) {
            const int i = rules.query(first_row + m * C::kRows + C::row(lane, C::slot(e)));
            const ScoreRule& rule = rules.of(m, C::slot(e));
            s[m][n].x[e] = fmaf(rule.added(i, first_key + n * 16 + C::column(lane, e)), unit, s[m][n].x[e]);
          }
        }
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) line[m][slot] = step[m][slot] = 0.0f;
      }
    }
  }

  // A function of (m, n, e) that sets the bias of an element to 0, for hidden elements: a NaN of the bias must not
  // reach the softmax.
  DEVICE auto bias_clearer() {
    return [this](int m, int n, int e) {
      if constexpr (config::kBias > 0) clear(bias[m * kKeyBlocks + n], e);
    };
  }

  // The part of the exponents that all elements of a row share: x, and what is added to all of them.
  template <class Unit>
  DEVICE float start(int m, int slot, float x) const {
    if constexpr (ScoreRule::kLine) x = fmaf(line[m][slot], Unit::kUnit, x);
    if constexpr (config::kAlibi && (config::kOneSided || kRamp))
      return fmaf(-slope[m][slot] * Unit::kUnit, distance[m][slot], x);
    return x;
  }
  // The largest addend of a row's elements. start: what start() returned. Only with kBounded: for lines, one-sided
  // ALiBi and ramps.
  template <class Unit>
  DEVICE float largest(int m, int slot, float start) const {
    if constexpr (kRamp) return start;
    const float last = (kKeyBlocks - 1) * 16 + C::column(0, C::kElements - 1);
    if constexpr (ScoreRule::kLine) start = fmaf(fmaxf(step[m][slot], 0.0f) * Unit::kUnit, last, start);
    if constexpr (config::kAlibi) start = fmaf(fmaxf(slope[m][slot], 0.0f) * Unit::kUnit, last, start);
    return start;
  }
  // The addend of an element's exponent. start: what start() returned.
  template <class Unit>
  DEVICE float addend(int m, int n, int e, float start) const {
    if constexpr (config::kBias > 0) {
      const float b = element(bias[m * kKeyBlocks + n], e);
      // Spelled out, since compilers do not remove the multiplication by 1 from an fma.
      start = Unit::kUnit == 1.0f ? b + start : fmaf(b, Unit::kUnit, start);
    }
    if constexpr (kRamp) return start;
    const float column = static_cast<float>(n * 16 + C::column(0, e));
    if constexpr (ScoreRule::kLine) start = fmaf(step[m][C::slot(e)] * Unit::kUnit, column, start);
    if constexpr (config::kAlibi) {
      if constexpr (config::kOneSided) {
        // Distances of visible keys are not negative, so they need no absolute value.
        start = fmaf(slope[m][C::slot(e)] * Unit::kUnit, column, start);
      } else {
        const float apart = distance[m][C::slot(e)] - column;
        start = fmaf(-slope[m][C::slot(e)] * Unit::kUnit, fmaxf(apart, -apart), start);
      }
    }
    return start;
  }

 private:
  DEVICE static int own_column(int lane) { return kRamp ? 0 : C::column(lane, 0); }
  template <class Block>
  DEVICE static void clear(Block& block, int e) {
    if constexpr (kHalves) {
      block[e / 2] &= e % 2 != 0 ? 0xffffu : 0xffff0000u;
    } else {
      block[e] = BiasElement{};
    }
  }
  template <class Block>
  DEVICE static float element(const Block& block, int e) {
    if constexpr (kHalves) {
      return target::to_float(half_of<BiasElement>(block[e / 2], e % 2 != 0));
    } else {
      return target::to_float(block[e]);
    }
  }
  // Copies both elements as one word: to put them together would wait for the load.
  template <class Block>
  DEVICE static void put_pair(Block& block, int e, const Pair& pair) {
    if constexpr (kHalves) {
      block[e / 2] = reinterpret_cast<const unsigned&>(pair);
    } else {
      block[e] = pair.x[0];
      block[e + 1] = pair.x[1];
    }
  }

  template <class Rules>
  DEVICE void load_bias(const Rules& rules, int first_row, int first_key, int lane) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const ScoreRule& rule = rules.of(m, slot);
        const auto& b = rule.p.bias;
        const BiasElement* const data =
            static_cast<const BiasElement*>(b.data) + rule.sequence * b.batch + rule.head / b.group * b.head;
        const int i = rules.query(first_row + m * C::kRows + C::row(lane, slot));
        const BiasElement* const row = data + (i < b.rows ? i : b.rows - 1) * b.row;
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
              put_pair(block, e, *reinterpret_cast<const Pair*>(row + (j < b.keys ? j : b.keys - 2)));
            } else if constexpr (C::kRun % 2 == 0) {
              put_pair(block, e, {one(e), one(e + 1)});
            } else {
              block[e] = one(e);
            }
          }
        }
      }
    }
  }
};
