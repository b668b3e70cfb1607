// Online softmax over key tiles (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1), in base 2. (With a bias,
// exponents are in natural units up to the power itself: attn/exponent.cuh.)
//
// Each row keeps a running max that is subtracted from its exponents. It may lag behind the true maximum: it moves only
// when a row has outgrown it, by a factor of 2^8. So most tiles need no rescale of the output accumulator. Whatever is
// subtracted, the quotient is the same, and p <= 2^8 keeps float16 and bfloat16 as accurate as p <= 1 does.
//
// SoftmaxRows is the state of the rows. OnlineSoftmax adds the steps of a key tile; for small head dims
// attn/late_softmax.cuh has others.
//
// Indices here and in all of attn/: m and n number the 16 x 16 blocks of a wave's tile by rows and by columns, e is an
// element of the lane in its block, and slot is one of the lane's rows in it. C is the type of a block's accumulator.
#pragma once

#include "attn/exponent.cuh"
#include "target/target.cuh"

// The state of the softmax of a wave's rows.
template <class C, int kRowBlocks>
struct SoftmaxRows {
  // By how much an exponent may exceed the running max: a factor of 2^8, in units of the exponent.
  static constexpr float kSlack = 8.0f * (Exponent::kUnit / Log2::kUnit);

  const float scale_log2;                       // turns scores into units of the exponent (attn/exponent.cuh)
  float running_max[kRowBlocks][C::kSlots];     // in these units; -inf until the row has seen a key
  float sum[kRowBlocks][C::kSlots];             // of this lane's columns only, until sum_rows()
  float rescale_factor[kRowBlocks][C::kSlots];  // by which the last move of running_max scales sum and output

  // scale_log2 is positive.
  DEVICE explicit SoftmaxRows(float scale_log2) : scale_log2(scale_log2) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        running_max[m][slot] = -target::infinity();
        sum[m][slot] = 0.0f;
      }
    }
  }

  // What is subtracted from a row's exponents: the running max. Before a row has seen a key all of its exponents are
  // -inf, and 0 is subtracted, since -inf would give NaN.
  DEVICE float shift(int m, int slot) const {
    return running_max[m][slot] == -target::infinity() ? 0.0f : running_max[m][slot];
  }

  // The largest element of a row of the tile, over all lanes that hold some of the row.
  template <int kKeyBlocks>
  DEVICE static float row_maximum(const C (&s)[kRowBlocks][kKeyBlocks], int m, int slot) {
    float maximum = -target::infinity();
    UNROLL for (int n = 0; n < kKeyBlocks; n++) {
      UNROLL for (int e = 0; e < C::kElements; e++) {
        if (C::slot(e) == slot) maximum = fmaxf(maximum, s[m][n].x[e]);
      }
    }
    return C::row_max(maximum);
  }

  // Brings the output to the running maxima of the last move.
  template <int kOutBlocks>
  DEVICE void rescale(C (&o)[kRowBlocks][kOutBlocks]) const {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int d = 0; d < kOutBlocks; d++) {
        UNROLL for (int e = 0; e < C::kElements; e++) o[m][d].x[e] *= rescale_factor[m][C::slot(e)];
      }
    }
  }

  // Completes the row sums and divides the output by them. Afterwards lse() is valid.
  template <int kOutBlocks>
  DEVICE void finish(C (&o)[kRowBlocks][kOutBlocks]) {
    sum_rows();
    divide(o);
  }

  // Adds up the sums of all lanes that hold some of a row.
  DEVICE void sum_rows() {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) sum[m][slot] = C::row_sum(sum[m][slot]);
    }
  }

  // Adds a learned sink to the sum of every row: one more score, which has no row of V. sink: in units of the exponent.
  // Call it after sum_rows(), and rescale() the output after it.
  DEVICE void add_sink(float sink) {
    add_sinks([sink](int, int) { return sink; });
  }
  // The same where each row has its own: sink(m, slot).
  template <class Sink>
  DEVICE void add_sinks(const Sink& sink) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const float before = running_max[m][slot], own = sink(m, slot);
        running_max[m][slot] = fmaxf(before, own);
        rescale_factor[m][slot] = Exponent::power(before - shift(m, slot));
        sum[m][slot] = sum[m][slot] * rescale_factor[m][slot] + Exponent::power(own - shift(m, slot));
      }
    }
  }

  // Divides the output by the row sums; a row that saw no key becomes 0. output_factor: a factor of the output, for
  // dropout 1 / (1 - dropout_p), and for float8 values their scale.
  template <int kOutBlocks>
  DEVICE void divide(C (&o)[kRowBlocks][kOutBlocks], float output_factor = 1.0f) const {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      float inverse[C::kSlots];
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        inverse[slot] = sum[m][slot] == 0.0f ? 0.0f : output_factor / sum[m][slot];
      }
      UNROLL for (int d = 0; d < kOutBlocks; d++) {
        UNROLL for (int e = 0; e < C::kElements; e++) o[m][d].x[e] *= inverse[C::slot(e)];
      }
    }
  }

  // The natural logarithm of the sum of exponentials; -inf for a row that saw no key, NaN for one that saw only NaN.
  DEVICE float lse(int m, int slot) const {
    if (running_max[m][slot] == -target::infinity() && sum[m][slot] == sum[m][slot]) return -target::infinity();
    return Exponent::logarithm(running_max[m][slot], sum[m][slot]);
  }
};

// The softmax that scales scores first: it turns them into exponents, and tests these for outgrown rows.
//
// With a bias, running maxima are in natural units (see Exponent). While all of the wave's are near 0, one multiply-add
// subtracts the maximum and changes to base 2. Its error is the rounding of maximum * log2(e), which is the same for
// all keys of the row. Otherwise the subtraction comes first, which is exact for the score that is the maximum.
template <class C, int kRowBlocks>
struct OnlineSoftmax : SoftmaxRows<C, kRowBlocks> {
  using Rows = SoftmaxRows<C, kRowBlocks>;
  using Rows::rescale_factor, Rows::kSlack, Rows::running_max, Rows::scale_log2, Rows::sum;

  static constexpr float kLargestNearZero = 1024.0f;  // the largest magnitude of a running max near 0, in natural units

  int threshold = -1;  // a row is outgrown if an exponent's bits exceed it; -1 until every row has seen a key
  bool maxima_near_zero = false;  // whether all of the wave's running maxima are near 0; natural units only

  using Rows::Rows;

  // Turns scores, and what is added to them, into exponents relative to the running max. The running max moves if a row
  // of the wave has outgrown it or has none yet. Returns whether it moved: the output accumulated so far must then be
  // rescaled before P V of this tile is added.
  //
  // The test for outgrown rows needs no maximum for each row: one over all elements of the lane decides. It compares
  // integers, for which the hardware has three-way maxima: positive floats order like their bits.
  template <int kKeyBlocks, class Added>
  DEVICE bool update_row_max(C (&s)[kRowBlocks][kKeyBlocks], const Added& added) {
    float start[kRowBlocks][C::kSlots];
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) { start[m][slot] = -this->shift(m, slot) * unit(); }
    }
    int largest = 0;
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int n = 0; n < kKeyBlocks; n++) {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          const int slot = C::slot(e);
          float& x = s[m][n].x[e];
          if constexpr (Exponent::kNatural) {
            x = fmaf(sum_of<Exponent>(x, scale_log2, added, m, n, e, slot), unit(), start[m][slot]);
          } else {
            x = exponent_of<Exponent>(x, scale_log2, added, m, n, e, slot, start[m][slot]);
          }
          const int bits = static_cast<int>(target::bits_of(x));
          largest = bits > largest ? bits : largest;
        }
      }
    }
    const bool moved = target::wave_any(largest > threshold);
    const bool natural = Exponent::kNatural && !maxima_near_zero;
    if (moved) move_running_max(s);
    if (natural) {
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int n = 0; n < kKeyBlocks; n++) {
          UNROLL for (int e = 0; e < C::kElements; e++) s[m][n].x[e] *= Log2::kUnit;
        }
      }
    }
    return moved;
  }

  // One unit of running_max, in units of the exponents that update_row_max() makes.
  DEVICE float unit() const { return Exponent::kNatural && maxima_near_zero ? Log2::kUnit : 1.0f; }

  template <int kKeyBlocks>
  DEVICE void move_running_max(C (&s)[kRowBlocks][kKeyBlocks]) {
    constexpr float kLn2 = 0.6931471805599453f;
    const float to_maximum = Exponent::kNatural && maxima_near_zero ? kLn2 : 1.0f;
    const float to_log2 = Exponent::kNatural && !maxima_near_zero ? Log2::kUnit : 1.0f;
    bool unsettled = false, far = false;
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const float maximum = Rows::row_maximum(s, m, slot);
        const bool first = running_max[m][slot] == -target::infinity();
        const bool all_masked = first && maximum == -target::infinity();
        const float rise = all_masked ? 0.0f : (first ? maximum : fmaxf(maximum, 0.0f));
        // Nothing was accumulated before the first maximum.
        rescale_factor[m][slot] = first ? 1.0f : target::exp2(-rise * to_log2);
        if (!all_masked) running_max[m][slot] = first ? rise : running_max[m][slot] + rise * to_maximum;
        sum[m][slot] *= rescale_factor[m][slot];
        unsettled = unsettled || all_masked;
        far = far || !(fabsf(running_max[m][slot]) <= kLargestNearZero);
        UNROLL for (int n = 0; n < kKeyBlocks; n++) {
          UNROLL for (int e = 0; e < C::kElements; e++) {
            if (C::slot(e) == slot) s[m][n].x[e] -= rise;
          }
        }
      }
    }
    if constexpr (Exponent::kNatural) maxima_near_zero = !target::wave_any(far);
    threshold = target::wave_any(unsettled) ? -1 : static_cast<int>(target::bits_of(kSlack * unit()));
  }

  // Turns exponents into probabilities. update_row_max() has already included what is added to scores.
  template <int kKeyBlocks, class... Added>
  DEVICE void exponentiate(C (&s)[kRowBlocks][kKeyBlocks], const Added&...) {
    // Keys outermost: P V of the first keys can start while the exponentials of the last ones are still being computed.
    UNROLL for (int n = 0; n < kKeyBlocks; n++) {
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          s[m][n].x[e] = target::exp2(s[m][n].x[e]);
          sum[m][C::slot(e)] += s[m][n].x[e];
        }
      }
    }
  }
};
