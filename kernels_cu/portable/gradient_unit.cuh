// The unit of probabilities, and so of the gradients of scores, between the kernels of the backward.
#pragma once

#include "target/target.cuh"

// Probabilities are multiplied by 2^kShift. With bfloat16 operands they go from one half of the waves to the other as
// float16, which ends at 6e-8: with as much room below 1 as there is, a row of a million keys has not lost a digit.
// Where operands are float16 themselves, gradients may be large and have no such room above.
template <class T>
struct GradientUnit {
  static constexpr int kShift = 0;
};
template <>
struct GradientUnit<bfloat16> {
  static constexpr int kShift = 14;  // a probability is 1 and rounding: three times as much fits
};

// What makes sums of them what they are.
template <class T>
constexpr float kFromGradientUnit = 1.0f / (1 << GradientUnit<T>::kShift);
