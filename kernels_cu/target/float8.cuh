// The type float8 (e4m3) of all targets, and its conversion from float32 for those that have no instruction for it. A
// target's file includes this after it has defined DEVICE.
#pragma once

// Four bits of exponent, three of mantissa: no infinity, and NaN where all bits but the sign are set.
struct float8 {
  unsigned char bits;
};

// Rounds the float with these bits to the nearest, ties to even. Magnitudes beyond 448 become 448, and NaN stays NaN.
DEVICE float8 float8_of_float_bits(unsigned bits) {
  constexpr unsigned kInfinity = 0x7f800000u, k448 = 0x43e00000u;
  const unsigned sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  unsigned code = magnitude > kInfinity ? 0x7fu : 0x7eu;
  if (magnitude < k448) {
    // Numbers below 2^-6 are 2^-9 apart. From there on they are an eighth of the next lower power of two apart.
    const int exponent = static_cast<int>(magnitude >> 23), normal = exponent - 121;
    const int shift = normal >= 0 ? 20 : 20 - normal;
    const unsigned mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    code = 0;
    if (shift < 25) code = (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1u)) >> shift;
    if (normal > 0) code += normal * 8;
  }
  return {static_cast<unsigned char>(sign | code)};
}
