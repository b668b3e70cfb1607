// The matrix product of up to eight rows: EightRowsMma is Mma<float16> with an A of 8 x kDepth elements and a C of
// 8 x 16. It takes half the instructions and half the registers. The lane's elements of a row of C are not neighbours.
// kHasEightRows: whether the target has it.
#pragma once

#include "target/target.cuh"

#if defined(RAWATTN_TARGET_HOST)
#include "target/host_eight_rows.cuh"
namespace target {
constexpr bool kHasEightRows = kWave == 32;
}  // namespace target
#else
#include "target/cuda_eight_rows.cuh"
namespace target {
constexpr bool kHasEightRows = true;
}  // namespace target
#endif
