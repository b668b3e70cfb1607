// What rows have come to in some of their keys, row by row, and how such parts become one: those of a block's waves in
// shared memory, and those of blocks in global memory.
#pragma once

#include "attn/exponent.cuh"
#include "attn/stored_keys.cuh"
#include "target/target.cuh"

struct alignas(16) FourFloats {
  float x[4];
};

// kRows: the most there are. kColumns: of the output.
template <int kRows, int kColumns>
struct RowPartials {
  FourFloats out[kRows][kColumns / 4];
  float running_max[kRows];
  float sum[kRows];

  // A wave's rows, of which `rows` are real. The softmax has summed them up.
  template <class C, int kRowBlocks, int kOutBlocks, class Softmax>
  DEVICE void leave(const C (&o)[kRowBlocks][kOutBlocks], const Softmax& softmax, int rows, int lane) {
    float* const columns = reinterpret_cast<float*>(out);
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const int row = m * 16 + C::row(lane, slot);
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

// Some columns of a row, four and four, in all of its keys.
template <int kFours>
struct MergedColumns {
  FourFloats out[kFours];
  float running_max, sum;

  DEVICE MergedColumns() : out{}, running_max(-target::infinity()), sum(0.0f) {}

  // Joins `count` partials, part(n) being the n-th one, in their order. kAtOnce are read before the first is used.
  template <int kAtOnce, class Part>
  DEVICE void join(int count, int row, int column, const Part& part) {
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
        // Of a part whose row saw no key the output is 0, and so is the weight.
        const float weight = weight_of(maxima[n]);
        sum = fmaf(sums[n], weight, sum);
        UNROLL for (int f = 0; f < kFours; f++) {
          UNROLL for (int i = 0; i < 4; i++) out[f].x[i] = fmaf(outs[n][f].x[i], weight, out[f].x[i]);
        }
      }
    }
  }

  // One more score in the sum, which has no value. sink: in units of the exponent.
  DEVICE void add_sink(float sink) {
    move(fmaxf(running_max, sink));
    sum += weight_of(sink);
  }
  // A row that saw no key becomes 0. factor: of the values.
  DEVICE void divide(float factor) {
    const float inverse = sum == 0.0f ? 0.0f : factor / sum;
    multiply(inverse);
  }
  DEVICE float lse() const {
    return running_max == -target::infinity() ? running_max : Exponent::logarithm(running_max, sum);
  }

 private:
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
  // What exponents are taken against: of a row without one all are -inf, whatever is subtracted.
  DEVICE float weight_of(float own) const {
    return Exponent::power(own - (running_max == -target::infinity() ? 0.0f : running_max));
  }
};
