// Arithmetic for the CUDA text of score functions and predicates (rawattn/_scores/cuda_text.py), where operators of C++
// differ from Python's or may be undefined: integers wrap around, divisions round down, and every operation is defined.
#pragma once

#include "target/target.cuh"

namespace score_maths {

constexpr int kLowest = -2147483647 - 1;

DEVICE int add(int x, int y) { return int(unsigned(x) + unsigned(y)); }
DEVICE int sub(int x, int y) { return int(unsigned(x) - unsigned(y)); }
DEVICE int mul(int x, int y) { return int(unsigned(x) * unsigned(y)); }
DEVICE int neg(int x) { return int(0u - unsigned(x)); }
DEVICE int abs(int x) { return x < 0 ? neg(x) : x; }
DEVICE int min(int x, int y) { return y < x ? y : x; }
DEVICE int max(int x, int y) { return x < y ? y : x; }

// A division by 0 gives 0.
DEVICE int floordiv(int x, int y) {
  if (y == 0) return 0;
  if (y == -1) return neg(x);
  const int quotient = x / y;
  return x % y != 0 && (x < 0) != (y < 0) ? quotient - 1 : quotient;
}
DEVICE int mod(int x, int y) {
  if (y == 0 || y == -1) return 0;
  const int rest = x % y;
  return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}

// float(x). static_part: the part of x that is known at compile time. x - static_part is the same for many elements of
// a lane, so it is converted once, and each element costs an addition instead of a conversion.
DEVICE float float_of(int x, int static_part) { return float(x - static_part) + float(static_part); }

DEVICE float abs(float x) { return fabsf(x); }
DEVICE float min(float x, float y) { return fminf(x, y); }
DEVICE float max(float x, float y) { return fmaxf(x, y); }

// As Python's: the remainder has the sign of y, and x is floordiv(x, y) * y + mod(x, y) up to rounding.
DEVICE float mod(float x, float y) {
  const float rest = target::fmod(x, y);
  return rest != 0.0f && (rest < 0.0f) != (y < 0.0f) ? rest + y : rest;
}
DEVICE float floordiv(float x, float y) {
  if (y == 0.0f) return x / y;
  // Not of mod(): that is y for a negative x and an infinite y.
  const float rest = target::fmod(x, y);
  const float below = rest != 0.0f && (rest < 0.0f) != (y < 0.0f) ? 1.0f : 0.0f;
  const float quotient = (x - rest) / y - below;
  const float whole = target::floor(quotient);
  return quotient - whole > 0.5f ? whole + 1.0f : whole;
}

// x to the power of kExponent, by squaring; kExponent >= 0.
template <int kExponent>
DEVICE int power(int x) {
  if constexpr (kExponent == 0)
    return 1;
  else if constexpr (kExponent % 2)
    return mul(x, power<kExponent - 1>(x));
  else
    return power<kExponent / 2>(mul(x, x));
}
template <int kExponent>
DEVICE float power(float x) {
  if constexpr (kExponent < 0)
    return 1.0f / power<-kExponent>(x);
  else if constexpr (kExponent == 0)
    return 1.0f;
  else if constexpr (kExponent == 1)
    return x;
  else if constexpr (kExponent % 2)
    return x * power<kExponent - 1>(x);
  else
    return power<kExponent / 2>(x * x);
}

// Functions in calls of 32-bit elements. div is a division that depends on the score; the third argument is 1 / y,
// where y is a literal number.
namespace exact {
DEVICE float div(float x, float y) { return x / y; }
DEVICE float div(float x, float y, float) { return x / y; }
DEVICE float exp(float x) { return target::exp(x); }
DEVICE float log(float x) { return target::log(x); }
DEVICE float tanh(float x) { return target::tanh(x); }
}  // namespace exact

// The same in calls of 16-bit elements: without branches, and with errors of some units of float32's last place, which
// are far below the rounding of such elements. log has an absolute error of 2^-22 near 1. Divisors between 2^-126 and
// 2^126 are divided by.
namespace quick {
DEVICE float div(float x, float y) { return x * target::reciprocal(y); }
DEVICE float div(float x, float, float reciprocal_of_y) { return x * reciprocal_of_y; }
DEVICE float exp(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  return target::exp2(x * kLog2E);
}
DEVICE float log(float x) {
  constexpr float kLn2 = 0.6931471805599453f;
  return target::quick_log2(x) * kLn2;
}
// A rational function, whose largest relative error is 5e-7. From kEnd on it is 1, so that its derivative is 0 there.
DEVICE float tanh(float x) {
  constexpr float kEnd = 7.8f;
  constexpr float kP[5] = {0.999999825f, 0.127284065f, 2.71287291e-3f, 7.28762386e-6f, -6.37106154e-9f};
  constexpr float kQ[4] = {1.0f, 0.460615974f, 2.292015e-2f, 1.98871011e-4f};
  const float y = x * x;
  const float p = fmaf(fmaf(fmaf(fmaf(kP[4], y, kP[3]), y, kP[2]), y, kP[1]), y, kP[0]);
  const float q = fmaf(fmaf(fmaf(kQ[3], y, kQ[2]), y, kQ[1]), y, kQ[0]);
  return fabsf(x) >= kEnd ? copysignf(1.0f, x) : x * p * target::reciprocal(q);
}
}  // namespace quick

// Rounds towards 0. A value out of range becomes the lowest or the largest int, NaN becomes 0.
DEVICE int saturated(float x) {
  if (!(x > -2147483648.0f)) return x == x ? kLowest : 0;
  return x < 2147483648.0f ? int(x) : 2147483647;
}
DEVICE int saturated(int64 x) { return x < kLowest ? kLowest : x > 2147483647 ? 2147483647 : int(x); }

}  // namespace score_maths
