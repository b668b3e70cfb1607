// The online softmax of attn/softmax.cuh for head dims so small that the exponentials take as long as the products:
// every other instruction hides between exponentials, the scaling of scores too.
//
// Before, scores are only looked through for an outgrown row: as integers, which compare like the positive floats of
// the same bits. A row of which even negative scores may be too large has a limit below all scores.
#pragma once

#include "attn/softmax.cuh"
#include "target/target.cuh"

template <class C, int kRowBlocks>
struct LateOnlineSoftmax : SoftmaxRows<C, kRowBlocks> {
  using Rows = SoftmaxRows<C, kRowBlocks>;
  using Rows::factor, Rows::kSlack, Rows::running_max, Rows::scale_log2, Rows::sum;
  static constexpr int kBelowAll = -1;  // of the bits that are compared, none of which is less than 0

  int limit[kRowBlocks][C::kSlots];  // bits of the largest score that the row's running maximum can stand

  DEVICE explicit LateOnlineSoftmax(float scale_log2) : Rows(scale_log2) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) limit[m][slot] = kBelowAll;
    }
  }

  // Running maxima move where the tile's scores have outgrown them. Returns whether one of the wave's did: then the
  // output accumulated so far must be rescaled before it meets this tile.
  template <int kKeyBlocks, class Added>
  DEVICE bool update_row_max(const C (&s)[kRowBlocks][kKeyBlocks], const Added&) {
    static_assert(kKeyBlocks > 0 && !ScoreRule::kAdds, "what is added to scores must be there before they are compared");
    bool outgrown = false;
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      int largest[C::kSlots] = {};
      UNROLL for (int n = 0; n < kKeyBlocks; n++) {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          const int bits = static_cast<int>(target::bits_of(s[m][n].x[e]));
          largest[C::slot(e)] = bits > largest[C::slot(e)] ? bits : largest[C::slot(e)];
        }
      }
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) outgrown = outgrown || largest[slot] > limit[m][slot];
    }
    const bool moved = target::wave_any(outgrown);
    if (moved) move_running_max(s);
    return moved;
  }

  // Scores become probabilities.
  template <int kKeyBlocks>
  DEVICE void exponentiate(C (&s)[kRowBlocks][kKeyBlocks]) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      float shift[C::kSlots];
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) shift[slot] = Rows::shift(m, slot);
      UNROLL for (int n = 0; n < kKeyBlocks; n++) {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          s[m][n].x[e] = target::exp2(fmaf(s[m][n].x[e], scale_log2, -shift[C::slot(e)]));
          sum[m][C::slot(e)] += s[m][n].x[e];
        }
      }
    }
  }

 private:
  template <int kKeyBlocks>
  DEVICE void move_running_max(const C (&s)[kRowBlocks][kKeyBlocks]) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const float before = running_max[m][slot];
        const float now = fmaxf(before, Rows::row_maximum(s, m, slot) * scale_log2);
        // Nothing was accumulated before the first maximum.
        factor[m][slot] = before == -target::infinity() ? 1.0f : target::exp2(before - now);
        running_max[m][slot] = now;
        sum[m][slot] *= factor[m][slot];
        const float largest = (now + kSlack) * target::reciprocal(scale_log2);
        limit[m][slot] = largest >= 0.0f ? static_cast<int>(target::bits_of(largest)) : kBelowAll;
      }
    }
  }
};
