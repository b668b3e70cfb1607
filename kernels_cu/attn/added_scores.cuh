// What joins the exponents of scores instead of the scores: the bias, ALiBi, and the line of a score function. Queries
// are rows here; attn/scores_of_keys.cuh has the twin for keys as rows.
#pragma once

#include "attn/score_rule.cuh"
#include "target/target.cuh"

// One of two keys side by side.
template <class T>
DEVICE T half_of(unsigned pair, bool odd) {
  T x;
  x.bits = static_cast<unsigned short>(odd ? pair >> 16 : pair);
  return x;
}

// What the bias, ALiBi and the line of a score function add to the scores of a tile of kRowBlocks x kKeyBlocks, queries
// being rows. It is read while the product is under way, and joins an exponent: one multiply-add each, whose addend it
// starts from. kRamp: what grows evenly from a tile's first key on is in the products already.
template <class C, int kRowBlocks, int kKeyBlocks, bool kRamp = false>
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
  // Of each row from the lane's first key: less the key's column, which is known when this is compiled. Of a ramp from
  // the tile's first key.
  float distance[kRowBlocks][C::kSlots], slope[kRowBlocks][C::kSlots];
  // Of each row the line at that key, and its step.
  float line[kRowBlocks][C::kSlots], step[kRowBlocks][C::kSlots];
  bool straight;  // the wave's lines are computed so: see are_straight()
  bool beyond;    // set before load() where a ramp of ALiBi has both sides: the tile is behind the diagonal

  // The largest addend of a row is known before those of its elements: see largest().
  static constexpr bool kBounded =
      config::kBias == 0 && (ScoreRule::kLine || config::kAlibi) && (kRamp || config::kOneSided || !config::kAlibi);

  // Of rows of the wave, for all tiles. rules: a ScoreRule or RowRules, as below.
  //
  // A key's addend is that of another key and steps: it has the rounding error of the largest of the tile. Of steep
  // lines that would be more than a score may be wrong by, and one that leaves the range of numbers is none. Those are
  // added to scores one by one.
  template <class Rules>
  DEVICE static bool are_straight(const Rules& rules, int first_row, int lane) {
    bool even = true;
    if constexpr (ScoreRule::kLine) {
      constexpr float kSteepest = 16.0f, kLargest = 1e30f;
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
          const ScoreRule& rule = rules.of(m, slot);
          const int i = rules.query(first_row + m * 16 + C::row(lane, slot));
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
  // The rest, where something else has filled `bias`.
  template <class Rules>
  DEVICE void load_distances(const Rules& rules, int first_row, int first_key, int lane) {
    if constexpr (config::kAlibi) {
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
          const ScoreRule& rule = rules.of(m, slot);
          const int i = rules.query(first_row + m * 16 + C::row(lane, slot));
          slope[m][slot] = kRamp && !config::kOneSided && beyond ? -rule.slope : rule.slope;
          distance[m][slot] = static_cast<float>(i + rule.offset - first_key - own_column(lane));
        }
      }
    }
    if constexpr (ScoreRule::kLine) {
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
          const ScoreRule& rule = rules.of(m, slot);
          const int i = rules.query(first_row + m * 16 + C::row(lane, slot));
          line[m][slot] = rule.added(i, first_key + own_column(lane));
          step[m][slot] = rule.step(i);
        }
      }
    }
  }

  // Where lines are not straight, scores have them from here on. unit: of a natural unit, in the scores'.
  template <class Rules>
  DEVICE void spell_out(C (&s)[kRowBlocks][kKeyBlocks], const Rules& rules, float unit, int first_row, int first_key,
                        int lane) {
    if constexpr (ScoreRule::kLine) {
      if (straight) return;
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int n = 0; n < kKeyBlocks; n++) {
          UNROLL for (int e = 0; e < C::kElements; e++) {
            const int i = rules.query(first_row + m * 16 + C::row(lane, C::slot(e)));
            const ScoreRule& rule = rules.of(m, C::slot(e));
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
    if constexpr (config::kAlibi && (config::kOneSided || kRamp))
      return fmaf(-slope[m][slot] * Unit::kUnit, distance[m][slot], x);
    return x;
  }
  // The largest addend of a row's elements, of lines and of ALiBi on one side alone, from that of its row.
  template <class Unit>
  DEVICE float largest(int m, int slot, float start) const {
    if constexpr (kRamp) return start;
    const float last = (kKeyBlocks - 1) * 16 + C::column(0, C::kElements - 1);
    if constexpr (ScoreRule::kLine) start = fmaf(fmaxf(step[m][slot], 0.0f) * Unit::kUnit, last, start);
    if constexpr (config::kAlibi) start = fmaf(fmaxf(slope[m][slot], 0.0f) * Unit::kUnit, last, start);
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
    if constexpr (kRamp) return start;
    const float column = static_cast<float>(n * 16 + C::column(0, e));
    if constexpr (ScoreRule::kLine) start = fmaf(step[m][C::slot(e)] * Unit::kUnit, column, start);
    if constexpr (config::kAlibi) {
      if constexpr (config::kOneSided) {
        // No key beyond the diagonal is seen: the distance has no sign to lose.
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

  template <class Rules>
  DEVICE void load_bias(const Rules& rules, int first_row, int first_key, int lane) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const ScoreRule& rule = rules.of(m, slot);
        const auto& b = rule.p.bias;
        const Bias* const data =
            static_cast<const Bias*>(b.data) + rule.sequence * b.batch + rule.head / b.group * b.head;
        const int i = rules.query(first_row + m * 16 + C::row(lane, slot));
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
