// The place of a key among the 16 of its block in the float32 sums of dbias (portable/bias_gradient.cuh). In this
// order, what two neighbouring lanes add at a time fills 32 bytes.
#pragma once

#include "target/target.cuh"

DEVICE constexpr int dbias_sum_position(int key) { return key % 8 / 4 * 8 + key / 8 * 4 + key % 4; }
