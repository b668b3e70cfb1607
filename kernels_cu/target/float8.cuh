// e4m3, for targets that have no instruction for it. Included where DEVICE is defined.
#pragma once

// Four bits of exponent, three of mantissa: no infinity, and NaN where all bits but the sign are set.
struct float8 {
  unsigned char bits;
};

// The nearest to a float of these bits, ties to even; what is beyond 448 becomes 448, and NaN stays NaN.
DEVICE float8 float8_of_float_bits(unsigned bits) {
  constexpr unsigned kInfinity = 0x7f800000u, k448 = 0x43e00000u;
  const unsigned sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  unsigned code = magnitude > kInfinity ? 0x7fu : 0x7eu;
  if (magnitude < k448) {
    // Below 2^-6 all steps are 2^-9; from there on an eighth of the power of two below.
    const int exponent = static_cast<int>(magnitude >> 23), normal = exponent - 121;
    const int shift = normal >= 0 ? 20 : 20 - normal;
    const unsigned mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    code = 0;
    if (shift < 25) code = (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1u)) >> shift;
    if (normal > 0) code += normal * 8;
  }
  return {static_cast<unsigned char>(sign | code)};
}
