// Partial results of decoding (attn/decode.cuh): for each row, the running max, the sum and the output (not yet divided
// by the sum) over some of its keys, and how partial results are merged. Those of a block's waves lie in shared memory,
// those of blocks that share a query tile in global memory.
#pragma once

#include "attn/exponent.cuh"
#include "attn/stored_keys.cuh"
#include "target/target.cuh"

struct alignas(16) FourFloats {
  float x[4];
};

// A partial result of up to kRows rows. kColumns: of the output.
template <int kRows, int kColumns>
struct RowPartials {
  FourFloats out[kRows][kColumns / 4];
  float running_max[kRows];
  float sum[kRows];

  // Stores a wave's rows, of which the first `rows` are real. softmax.sum_rows() must come before.
  template <class C, int kRowBlocks, int kOutBlocks, class Softmax>
  DEVICE void store(const C (&o)[kRowBlocks][kOutBlocks], const Softmax& softmax, int rows, int lane) {
    float* const columns = reinterpret_cast<float*>(out);
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const int row = m * C::kRows + C::row(lane, slot);
        if (row >= rows) continue;
        UNROLL for (int d = 0; d < kOutBlocks; d++) {
          UNROLL for (int e = 0; e < C::kElements; e++) {
            if (C::slot(e) == slot) columns[row * kColumns + d * 16 + output_column<C>(lane, e)] = o[m][d].x[e];
          }
        }
        if (C::column(lane, 0) == 0) {
          running_max[row] = softmax.running_max[m][slot];
          sum[row] = softmax.sum[m][slot];
        }
      }
    }
  }
};

// 4 * kFours columns of a row, merged over all partial results so far.
template <int kFours>
struct MergedColumns {
  FourFloats out[kFours];
  float running_max, sum;

  DEVICE MergedColumns() : out{}, running_max(-target::infinity()), sum(0.0f) {}

  // Merges `count` partial results into this one, in order; part(n) is the n-th. kAtOnce of them are loaded before the
  // first is used.
  template <int kAtOnce, class Part>
  DEVICE void merge(int count, int row, int column, const Part& part) {
#pragma unroll 1
    for (int base = 0; base < count; base += kAtOnce) {
      float maxima[kAtOnce], sums[kAtOnce];
      FourFloats outs[kAtOnce][kFours];
      UNROLL for (int n = 0; n < kAtOnce; n++) {
        maxima[n] = -target::infinity();
        sums[n] = 0.0f;
        UNROLL for (int f = 0; f < kFours; f++) outs[n][f] = FourFloats{};
        if (base + n < count) {
          const auto& own = part(base + n);
          maxima[n] = own.running_max[row];
          sums[n] = own.sum[row];
          UNROLL for (int f = 0; f < kFours; f++) outs[n][f] = own.out[row][column / 4 + f];
        }
      }
      float largest = running_max;
      UNROLL for (int n = 0; n < kAtOnce; n++) largest = fmaxf(largest, maxima[n]);
      move(largest);
      UNROLL for (int n = 0; n < kAtOnce; n++) {
        // A partial result whose row saw no key has an output of 0, and a weight of 0.
        const float weight = weight_of(maxima[n]);
        sum = fmaf(sums[n], weight, sum);
        UNROLL for (int f = 0; f < kFours; f++) {
          UNROLL for (int i = 0; i < 4; i++) out[f].x[i] = fmaf(outs[n][f].x[i], weight, out[f].x[i]);
        }
      }
    }
  }

  // Adds a learned sink to the sum: one more score, which has no row of V. sink: in units of the exponent.
  DEVICE void add_sink(float sink) {
    move(fmaxf(running_max, sink));
    sum += weight_of(sink);
  }
  // Divides the output by the sum; a row that saw no key becomes 0. factor: the scale of the values.
  DEVICE void divide(float factor) {
    const float inverse = sum == 0.0f ? 0.0f : factor / sum;
    multiply(inverse);
  }
  DEVICE bool has_nan() const {
    float zero = 0.0f;
    UNROLL for (int f = 0; f < kFours; f++) { UNROLL for (int i = 0; i < 4; i++) zero = fmaf(out[f].x[i], 0.0f, zero); }
    return zero != 0.0f;
  }
  DEVICE float lse() const {
    return running_max == -target::infinity() && sum == sum ? running_max : Exponent::logarithm(running_max, sum);
  }

 private:
  // Makes `largest` the running max and rescales sum and output.
  DEVICE void move(float largest) {
    const float before = running_max;
    running_max = largest;
    const float factor = weight_of(before);
    sum *= factor;
    multiply(factor);
  }
  DEVICE void multiply(float factor) {
    UNROLL for (int f = 0; f < kFours; f++) { UNROLL for (int i = 0; i < 4; i++) out[f].x[i] *= factor; }
  }
  // The weight of a partial result with the running max `own`. Before the row has seen a key both are -inf, and 0 is
  // subtracted, since -inf would give NaN.
  DEVICE float weight_of(float own) const {
    return Exponent::power(own - (running_max == -target::infinity() ? 0.0f : running_max));
  }
};
