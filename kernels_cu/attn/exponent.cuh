// Exponents of the softmax, in forwards and backwards: their unit, power and logarithm, and how an element of Q K^T
// becomes one.
#pragma once

#include "target/target.cuh"

// Units of an exponent. kUnit: one natural unit, in this unit.
struct Natural {
  static constexpr float kUnit = 1.0f;
};
struct Log2 {
  static constexpr float kUnit = 1.4426950408889634f;
};
// The unit of the softmax: base 2, but natural where there is a bias. Users hide keys by a bias of the lowest number of
// a dtype. It must not overflow, as it would in base 2, and the difference of two such scores must be 0.
struct Exponent {
  static constexpr bool kNatural = config::kBias > 0;
  static constexpr float kUnit = kNatural ? 1.0f : Log2::kUnit;

  DEVICE static float power(float x) { return target::exp2(kNatural ? x * Log2::kUnit : x); }
  // The natural logarithm of a sum of powers from whose exponents running_max was subtracted.
  DEVICE static float logarithm(float running_max, float sum) {
    constexpr float kLn2 = 0.6931471805599453f;
    if constexpr (kNatural) return fmaf(kLn2, target::log2(sum), running_max);
    return kLn2 * (running_max + target::log2(sum));
  }
};

// The scaled product and what is added to its score, in Unit. scale: turns products into Unit. added: AddedScores.
template <class Unit, class Added>
DEVICE float sum_of(float product, float scale, const Added& added, int m, int n, int e, int slot) {
  // Adding -0 changes nothing, while adding 0 would change the sign of -0.
  return fmaf(product, scale, added.template addend<Unit>(m, n, e, added.template start<Unit>(m, slot, -0.0f)));
}
// The exponent of a product: its score, what is added to the score, and `start`, which is minus the running max or
// minus the lse. A bias is added to the score before anything is subtracted. So a bias of a dtype's lowest number
// absorbs the score, and a row that has no other bias weighs all keys alike.
template <class Unit, class Added>
DEVICE float exponent_of(float product, float scale, const Added& added, int m, int n, int e, int slot, float start) {
  if constexpr (config::kBias > 0) return sum_of<Unit>(product, scale, added, m, n, e, slot) + start;
  return fmaf(product, scale, added.template addend<Unit>(m, n, e, added.template start<Unit>(m, slot, start)));
}
