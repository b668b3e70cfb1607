// A sum of float32 numbers that does not depend on the order in which they come.
//
// It is a fixed-point number of 32-bit digits, which begins with the last bit of the smallest float (Kulisch and
// Miranker 1986). A float is added to two neighbouring digits. Each digit is stored in 64 bits, so blocks add to it
// atomically and carry nothing: there is room for 2^31 numbers.
#pragma once

#include "target/target.cuh"

struct ExactSum {
  static constexpr int kDigits = 9;
  static constexpr int kWords =
      kDigits + 1;  // the last word counts inf in its lower half, -inf in its upper half, NaN in both

  unsigned long long words[kWords];

  DEVICE void add(float x) {
    const unsigned bits = static_cast<unsigned>(target::bits_of(x)), exponent = bits >> 23 & 255;
    const bool negative = bits >> 31 != 0;
    if (exponent == 255) {
      const bool nan = (bits & 0x7fffffu) != 0;
      target::atomic_add(words + kDigits, (nan || !negative ? 1ull : 0ull) + (nan || negative ? 1ull << 32 : 0ull));
      return;
    }
    const unsigned long long fraction = (bits & 0x7fffffu) | (exponent > 0 ? 0x800000u : 0u);
    const unsigned at = exponent > 0 ? exponent - 1 : 0;
    const unsigned long long shifted = fraction << at % 32, added = negative ? 0 - shifted : shifted;
    target::atomic_add(words + at / 32, added & 0xffffffffull);
    target::atomic_add(words + at / 32 + 1, static_cast<unsigned long long>(static_cast<int64>(added) >> 32));
  }

  // Returns the sum and makes it 0 again.
  DEVICE float read_and_clear() {
    unsigned digits[kDigits];
    int64 carry = 0;
    UNROLL for (int n = 0; n < kDigits; n++) {
      const int64 digit = static_cast<int64>(words[n]) + carry;
      digits[n] = static_cast<unsigned>(digit);
      carry = digit >> 32;
      words[n] = 0;
    }
    const unsigned long long others = words[kDigits];
    words[kDigits] = 0;
    if (others != 0) {
      const float above = (others & 0xffffffffull) != 0 ? target::infinity() : 0.0f;
      const float below = others >> 32 != 0 ? -target::infinity() : 0.0f;
      return above + below;
    }
    // A negative sum is negated first: digits of both signs would cancel in the conversion.
    const bool negative = carry < 0;
    unsigned long long more = negative ? 1 : 0;
    UNROLL for (int n = 0; n < kDigits; n++) {
      more += negative ? ~digits[n] : digits[n];
      digits[n] = static_cast<unsigned>(more);
      more >>= 32;
    }
    double magnitude = static_cast<double>((negative ? ~carry : carry) + static_cast<int64>(more));
    UNROLL for (int n = kDigits - 1; n >= 0; n--) magnitude = magnitude * 4294967296.0 + digits[n];
    magnitude *= kLeast;
    return static_cast<float>(negative ? -magnitude : magnitude);
  }

 private:
  static constexpr double kLeast = 1.401298464324817e-45;  // 2^-149
};
