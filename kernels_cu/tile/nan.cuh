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
  // Adds the elements of words of memory.
  template <class Words>
  DEVICE void add_stored(const Words& words) {
    constexpr int kWords = (sizeof(Words) + 3) / 4;
    unsigned word[kWords];
    if constexpr (sizeof(Words) == 2) {
      word[0] = words.x;
    } else {
      UNROLL for (int n = 0; n < kWords; n++) word[n] = reinterpret_cast<const unsigned*>(&words)[n];
    }
    UNROLL for (int n = 0; n < kWords; n++) {
      if constexpr (sizeof(T) == 2) {
        pairs[n % kSums] = target::Mma<T>::fold_nan(word[n], pairs[n % kSums]);
      } else {
        numbers[n % kSums] = fmaf(target::float_of(word[n]), 0.0f, numbers[n % kSums]);
      }
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
