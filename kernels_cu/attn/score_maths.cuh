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
  const float quotient = (x - mod(x, y)) / y;
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

// Rounds towards 0. A value out of range becomes the lowest or the largest int, NaN becomes 0.
DEVICE int saturated(float x) {
  if (!(x > -2147483648.0f)) return x == x ? kLowest : 0;
  return x < 2147483648.0f ? int(x) : 2147483647;
}
DEVICE int saturated(int64 x) { return x < kLowest ? kLowest : x > 2147483647 ? 2147483647 : int(x); }

}  // namespace score_maths
