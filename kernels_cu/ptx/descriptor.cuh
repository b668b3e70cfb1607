// How a product is told where in shared memory its operand lies.
#pragma once

#include "target/target.cuh"

namespace ptx {

// Which way an operand lies in its rows of 128 bytes: along the depth of the product (K-major), or along the rows of A
// or the columns of B (MN-major). The values are those of the instruction's transpositions.
enum class Major { K = 0, MN = 1 };

// Shared-memory operand of 128-byte rows in the 128-byte swizzle; the tile starts at a multiple of 1024 bytes.
// `leading` is the distance in bytes from one block of 64 columns to the next where the operand is MN-major, else
// unused; `eight_rows` that from eight rows to the next eight.
DEVICE unsigned long long wgmma_descriptor(const void* shared, unsigned leading, unsigned eight_rows = 1024) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62;
  const unsigned long long address = (target::shared_address(shared) >> 4) & 0x3FFF;
  return address | static_cast<unsigned long long>(leading >> 4) << 16 |
         static_cast<unsigned long long>(eight_rows >> 4) << 32 | kSwizzle128;
}

// The same without a swizzle, K-major and 32 bytes deep: each row's two halves of 16 bytes are the same bytes, and rows
// follow each other. The tile starts at a multiple of 16 bytes.
DEVICE unsigned long long repeated_descriptor(const void* shared) {
  constexpr unsigned long long kEightRows = 8 * 16;
  return (target::shared_address(shared) >> 4 & 0x3FFF) | kEightRows >> 4 << 32;
}

}  // namespace ptx
