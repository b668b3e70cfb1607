// The unit of probabilities in the main kernel of the backward, and so of dS and of the sums of dQ that it leaves.
//
// Probabilities are multiplied by 2^kUnitShift. It is not 0 where operands are bfloat16 but weights go from one half of
// the waves to the other as float16 (portable/handover.cuh), whose least number is 6e-8: the factor makes use of
// float16's range above 1, so that even in a row of a million keys probabilities keep all of their digits. Where
// operands are float16 themselves it is 0, since dS may be large and would overflow.
#pragma once

#include "target/target.cuh"

// Times this, dS and sums of it are in natural units.
constexpr float kFromGradientUnit = 1.0f / (1 << config::kUnitShift);
