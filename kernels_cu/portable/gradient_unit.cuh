// The unit of probabilities, and so of the gradients of scores, between the kernels of the backward.
//
// Probabilities are multiplied by 2^kUnitShift. Where they go from one half of the waves to the other as float16, which
// ends at 6e-8, though operands are bfloat16, that leaves as much room below 1 as there is: a row of a million keys has
// not lost a digit. Where operands are float16 themselves, gradients may be large and have no such room above.
#pragma once

#include "target/target.cuh"

// What makes sums of them what they are.
constexpr float kFromGradientUnit = 1.0f / (1 << config::kUnitShift);
