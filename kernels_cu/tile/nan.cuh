// Whether there are NaN or infinities in accumulators.
#pragma once

#include "target/target.cuh"

// Whether any of some numbers is NaN or an infinity: 0 times such a number is NaN, in 16 bits too. There are several
// sums, since one would be a long chain of additions that wait for each other.
template <class T>
struct NanSum {
  static constexpr int kSums = 4;

  unsigned pairs[kSums] = {};
  float numbers[kSums] = {};

  // Adds two numbers as they are stored. 16-bit ones share a conversion with their store. n: counts calls.
  DEVICE void add(int n, float x, float y) {
    if constexpr (sizeof(T) == 2) {
      pairs[n % kSums] = target::Mma<T>::fold_nan(target::Mma<T>::to_pair(x, y), pairs[n % kSums]);
    } else {
      numbers[n % kSums] = fmaf(x, 0.0f, fmaf(y, 0.0f, numbers[n % kSums]));
    }
  }
  DEVICE bool any() const {
    unsigned common = 0;
    UNROLL for (int n = 0; n < kSums; n++) {
      common |= sizeof(T) == 2 ? pairs[n] & 0x7fff7fffu : target::bits_of(numbers[n]) & 0x7fffffff;
    }
    return common != 0;
  }
};
