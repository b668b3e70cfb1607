// Online softmax over key tiles (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1), in base 2.
//
// Each row keeps a running maximum that its exponents are taken against. It may lag behind the true one: it only moves
// when that has outgrown it by 2^8, so most tiles leave the output accumulator alone. Any value gives the same
// quotient, and p <= 2^8 keeps float16 and bfloat16 as accurate as p <= 1 does.
#pragma once

#include "attn/exponent.cuh"
#include "target/target.cuh"

// What the softmax of a wave's rows has come to.
template <class C, int kRowBlocks>
struct SoftmaxRows {
  static constexpr float kSlack = 8.0f * (Exponent::kUnit / Log2::kUnit);

  const float scale_log2;                    // from scores to units of the exponent
  float running_max[kRowBlocks][C::kSlots];  // in these units; -inf until the row has seen a key
  float sum[kRowBlocks][C::kSlots];          // this lane's columns only, until finish()
  float factor[kRowBlocks][C::kSlots];       // of the last move

  // scale_log2 is positive.
  DEVICE explicit SoftmaxRows(float scale_log2) : scale_log2(scale_log2) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        running_max[m][slot] = -target::infinity();
        sum[m][slot] = 0.0f;
      }
    }
  }

  // What exponents are taken against: of a row without one all are -inf, whatever is subtracted.
  DEVICE float shift(int m, int slot) const {
    return running_max[m][slot] == -target::infinity() ? 0.0f : running_max[m][slot];
  }

  // The largest score of a tile's row.
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

  template <int kOutBlocks>
  DEVICE void rescale(C (&o)[kRowBlocks][kOutBlocks]) const {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int d = 0; d < kOutBlocks; d++) {
        UNROLL for (int e = 0; e < C::kElements; e++) o[m][d].x[e] *= factor[m][C::slot(e)];
      }
    }
  }

  // Sums up rows and divides the output by the sums. Afterwards lse() may be asked.
  template <int kOutBlocks>
  DEVICE void finish(C (&o)[kRowBlocks][kOutBlocks]) {
    sum_rows();
    divide(o);
  }

  DEVICE void sum_rows() {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) sum[m][slot] = C::row_sum(sum[m][slot]);
    }
  }

  // One more score in every row's sum, which has no value. sink: in units of the exponent. The output must be rescaled.
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
        factor[m][slot] = Exponent::power(before - shift(m, slot));
        sum[m][slot] = sum[m][slot] * factor[m][slot] + Exponent::power(own - shift(m, slot));
      }
    }
  }

  // A row that saw no key becomes 0. kept: the share of probabilities that dropout keeps, inverted.
  template <int kOutBlocks>
  DEVICE void divide(C (&o)[kRowBlocks][kOutBlocks], float kept = 1.0f) const {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      float inverse[C::kSlots];
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        inverse[slot] = sum[m][slot] == 0.0f ? 0.0f : kept / sum[m][slot];
      }
      UNROLL for (int d = 0; d < kOutBlocks; d++) {
        UNROLL for (int e = 0; e < C::kElements; e++) o[m][d].x[e] *= inverse[C::slot(e)];
      }
    }
  }

  // Natural logarithm of the sum of exponentials; -inf for a row that saw no key.
  DEVICE float lse(int m, int slot) const {
    if (running_max[m][slot] == -target::infinity()) return -target::infinity();
    return Exponent::logarithm(running_max[m][slot], sum[m][slot]);
  }
};

// Scores are scaled as soon as they are there, and exponents looked through for an outgrown row.
//
// Beside a bias running maxima are natural (see Exponent). Of maxima near 0 the difference to them and the change to
// base 2 are one multiply-add: its error is what the maximum times log2 e loses by rounding, for all keys of the row
// alike. Of others the difference comes first, which is exact where a score is the maximum.
template <class C, int kRowBlocks>
struct OnlineSoftmax : SoftmaxRows<C, kRowBlocks> {
  using Rows = SoftmaxRows<C, kRowBlocks>;
  using Rows::factor, Rows::kSlack, Rows::running_max, Rows::scale_log2, Rows::sum;

  static constexpr float kNear = 1024.0f;

  int threshold = -1;  // of an outgrowing exponent's bits; below all until every row has seen a key
  bool near = false;   // all of the wave's running maxima are: of natural ones alone

  using Rows::Rows;

  // Scores, and what is added to them, become exponents relative to the running maximum, which moves first if a row has
  // outgrown it or has none yet. Returns whether the wave's running maxima moved: then the output accumulated so far
  // must be rescaled before it meets this tile.
  //
  // Looking for an outgrown row needs no maximum by rows, and a positive float compares like the integer of the same
  // bits, for which the hardware takes three-way maxima.
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
    const bool natural = Exponent::kNatural && !near;
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

  // Of a running maximum, in those of exponents.
  DEVICE float unit() const { return Exponent::kNatural && near ? Log2::kUnit : 1.0f; }

  template <int kKeyBlocks>
  DEVICE void move_running_max(C (&s)[kRowBlocks][kKeyBlocks]) {
    constexpr float kLn2 = 0.6931471805599453f;
    const float to_maximum = Exponent::kNatural && near ? kLn2 : 1.0f;
    const float to_log2 = Exponent::kNatural && !near ? Log2::kUnit : 1.0f;
    bool unsettled = false, far = false;
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const float maximum = Rows::row_maximum(s, m, slot);
        const bool first = running_max[m][slot] == -target::infinity();
        const bool all_masked = first && maximum == -target::infinity();
        const float rise = all_masked ? 0.0f : (first ? maximum : fmaxf(maximum, 0.0f));
        factor[m][slot] = first ? 1.0f : target::exp2(-rise * to_log2);  // nothing was accumulated before the first
        if (!all_masked) running_max[m][slot] = first ? rise : running_max[m][slot] + rise * to_maximum;
        sum[m][slot] *= factor[m][slot];
        unsettled = unsettled || all_masked;
        far = far || !(fabsf(running_max[m][slot]) <= kNear);
        UNROLL for (int n = 0; n < kKeyBlocks; n++) {
          UNROLL for (int e = 0; e < C::kElements; e++) {
            if (C::slot(e) == slot) s[m][n].x[e] -= rise;
          }
        }
      }
    }
    if constexpr (Exponent::kNatural) near = !target::wave_any(far);
    threshold = target::wave_any(unsettled) ? -1 : static_cast<int>(target::bits_of(kSlack * unit()));
  }

  // Exponents become probabilities: what is added to scores is in them.
  template <int kKeyBlocks, class... Added>
  DEVICE void exponentiate(C (&s)[kRowBlocks][kKeyBlocks], const Added&...) {
    // Keys outermost: P V of the first keys can start while the exponentials of the last are still being computed.
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
