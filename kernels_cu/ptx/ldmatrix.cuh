// ldmatrix from an address in shared memory plus a constant that the instruction itself adds.
#pragma once

#include "target/cuda.cuh"

namespace ptx {

// Loads four matrices of 8 x 8 elements of 16 bits. Lane 8 i + n gives the address of row n of matrix i. Lane 4 n + m
// gets the m-th pair of elements in row n of each matrix.
template <int kOffset>
DEVICE void ldmatrix(unsigned (&r)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4 + %5];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row), "n"(kOffset)
               : "memory");
}

}  // namespace ptx
