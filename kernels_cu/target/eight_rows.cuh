// The matrix product of eight rows: EightRowsMma is Mma<float16> with an A of 8 x kDepth elements and a C of 8 x 16. It
// takes half the instructions and half the registers. The lane's elements of a row of C are not neighbours. Only
// targets whose waves have 32 lanes have it.
#pragma once

#include "target/target.cuh"

#if defined(RAWATTN_TARGET_HOST)
#include "target/host_eight_rows.cuh"
#else
#include "target/cuda_eight_rows.cuh"
#endif
