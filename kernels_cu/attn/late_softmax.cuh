// The online softmax of attn/softmax.cuh for head dims so small that the exponentials take as long as the matrix
// products. All other instructions should then hide between exponentials, so scores are scaled only there.
//
// update_row_max() compares unscaled scores with a limit for each row to find outgrown rows. It compares their bits as
// integers, which order like positive floats. Negative scores all count as 0 there. While even a negative score may be
// too large for a row, its limit is kAlwaysOutgrown, and the row counts as outgrown.
#pragma once

#include "attn/softmax.cuh"
#include "target/target.cuh"

template <class C, int kRowBlocks>
struct LateOnlineSoftmax : SoftmaxRows<C, kRowBlocks> {
  using Rows = SoftmaxRows<C, kRowBlocks>;
  using Rows::rescale_factor, Rows::kSlack, Rows::running_max, Rows::scale_log2, Rows::sum;
  static constexpr int kAlwaysOutgrown = -1;  // less than all bits that are compared, which are 0 or more

  // Bits of the largest unscaled score that does not outgrow the row's running max.
  int score_limit[kRowBlocks][C::kSlots];

  DEVICE explicit LateOnlineSoftmax(float scale_log2) : Rows(scale_log2) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) score_limit[m][slot] = kAlwaysOutgrown;
    }
  }

  // Moves the running maxima of rows that the tile's scores have outgrown. Returns whether one of the wave's moved: the
  // output accumulated so far must then be rescaled before P V of this tile is added.
  template <int kKeyBlocks, class Added>
  DEVICE bool update_row_max(const C (&s)[kRowBlocks][kKeyBlocks], const Added& added) {
    static_assert(kKeyBlocks > 0 && (!ScoreRule::kAdds || Added::kBounded), "what is added has a bound by rows");
    bool outgrown = false;
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      int largest[C::kSlots] = {};
      UNROLL for (int n = 0; n < kKeyBlocks; n++) {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          const int bits = static_cast<int>(target::bits_of(s[m][n].x[e]));
          largest[C::slot(e)] = bits > largest[C::slot(e)] ? bits : largest[C::slot(e)];
        }
      }
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        // The limit leaves room for the largest addend of the row in this tile, so scores are compared without addends.
        if constexpr (Added::kBounded)
          score_limit[m][slot] = score_limit_of(running_max[m][slot] - bound(added, m, slot));
        outgrown = outgrown || largest[slot] > score_limit[m][slot];
      }
    }
    const bool moved = target::wave_any(outgrown);
    if (moved) move_running_max(s, added);
    return moved;
  }

  // Turns unscaled scores, and what is added to them, into probabilities.
  template <int kKeyBlocks, class Added>
  DEVICE void exponentiate(C (&s)[kRowBlocks][kKeyBlocks], const Added& added) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      float start[C::kSlots];
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        start[slot] = added.template start<Log2>(m, slot, -Rows::shift(m, slot));
      }
      UNROLL for (int n = 0; n < kKeyBlocks; n++) {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          const float addend = added.template addend<Log2>(m, n, e, start[C::slot(e)]);
          s[m][n].x[e] = target::exp2(fmaf(s[m][n].x[e], scale_log2, addend));
          sum[m][C::slot(e)] += s[m][n].x[e];
        }
      }
    }
  }

 private:
  // The largest addend of a row in this tile, in base 2.
  template <class Added>
  DEVICE static float bound(const Added& added, int m, int slot) {
    return added.template largest<Log2>(m, slot, added.template start<Log2>(m, slot, 0.0f));
  }
  // The limit of a row whose exponents may exceed `exponent` by kSlack.
  DEVICE int score_limit_of(float exponent) const {
    const float largest = (exponent + kSlack) * target::reciprocal(scale_log2);
    return largest >= 0.0f ? static_cast<int>(target::bits_of(largest)) : kAlwaysOutgrown;
  }
  // The largest exponent of a row of the tile, before the running max is subtracted.
  template <int kKeyBlocks, class Added>
  DEVICE float row_maximum(const C (&s)[kRowBlocks][kKeyBlocks], const Added& added, int m, int slot) const {
    if constexpr (!Added::kBounded) return Rows::row_maximum(s, m, slot) * scale_log2;
    const float start = added.template start<Log2>(m, slot, 0.0f);
    float maximum = -target::infinity();
    UNROLL for (int n = 0; n < kKeyBlocks; n++) {
      UNROLL for (int e = 0; e < C::kElements; e++) {
        const float exponent = fmaf(s[m][n].x[e], scale_log2, added.template addend<Log2>(m, n, e, start));
        if (C::slot(e) == slot) maximum = fmaxf(maximum, exponent);
      }
    }
    return C::row_max(maximum);
  }
  template <int kKeyBlocks, class Added>
  DEVICE void move_running_max(const C (&s)[kRowBlocks][kKeyBlocks], const Added& added) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const float before = running_max[m][slot];
        const float now = fmaxf(before, row_maximum(s, added, m, slot));
        // Nothing was accumulated before the first maximum.
        rescale_factor[m][slot] = before == -target::infinity() ? 1.0f : target::exp2(before - now);
        running_max[m][slot] = now;
        sum[m][slot] *= rescale_factor[m][slot];
        if constexpr (!Added::kBounded) score_limit[m][slot] = score_limit_of(now);
      }
    }
  }
};
