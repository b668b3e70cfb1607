// Where a key stands among the 16 of its columns in float32 sums of dbias: what two lanes add at a time fills 32 bytes.
#pragma once

#include "target/target.cuh"

DEVICE constexpr int summed_position(int key) { return key % 8 / 4 * 8 + key / 8 * 4 + key % 4; }
