// What the softmax exponentiates: its unit, its power and logarithm, and how a product becomes one.
#pragma once

#include "target/target.cuh"

// Units of an exponent: what one natural unit is there.
struct Natural {
  static constexpr float kUnit = 1.0f;
};
struct Log2 {
  static constexpr float kUnit = 1.4426950408889634f;
};
// Of what the softmax exponentiates. Where there is a bias it is natural: the least number of a dtype, by which people
// hide keys, must not overflow, and of two such scores the difference must be 0.
struct Exponent {
  static constexpr bool kNatural = config::kBias > 0;
  static constexpr float kUnit = kNatural ? 1.0f : Log2::kUnit;

  DEVICE static float power(float x) { return target::exp2(kNatural ? x * Log2::kUnit : x); }
  // The logarithm of a sum whose terms were taken against running_max.
  DEVICE static float logarithm(float running_max, float sum) {
    constexpr float kLn2 = 0.6931471805599453f;
    if constexpr (kNatural) return fmaf(kLn2, target::log2(sum), running_max);
    return kLn2 * (running_max + target::log2(sum));
  }
};

// A product's score with what is added to it, in units of an exponent. scale: from products to these.
template <class Unit, class Added>
DEVICE float sum_of(float product, float scale, const Added& added, int m, int n, int e, int slot) {
  // An addition of -0 is none, one of 0 might change a sign.
  return fmaf(product, scale, added.template addend<Unit>(m, n, e, added.template start<Unit>(m, slot, -0.0f)));
}
// The exponent of a product: with what is added to its score, over `start`. A bias joins the score before anything is
// subtracted: beside the least number of a dtype a score is lost, and a row that has no other bias weighs all keys
// alike.
template <class Unit, class Added>
DEVICE float exponent_of(float product, float scale, const Added& added, int m, int n, int e, int slot, float start) {
  if constexpr (config::kBias > 0) return sum_of<Unit>(product, scale, added, m, n, e, slot) + start;
  return fmaf(product, scale, added.template addend<Unit>(m, n, e, added.template start<Unit>(m, slot, start)));
}
