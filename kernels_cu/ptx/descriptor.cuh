// Descriptors, which tell a wgmma where in shared memory an operand lies and in which layout.
#pragma once

#include "target/target.cuh"

namespace ptx {

// What is contiguous in an operand's rows of 128 bytes: the depth of the product (K-major), or the rows of A or the
// columns of B (MN-major). The values are those of the instruction's transpose operands.
enum class Major { K = 0, MN = 1 };

// The descriptor of an operand with rows of 128 bytes in the 128-byte swizzle. The tile starts at a multiple of 1024
// bytes. leading: for an MN-major operand, the bytes from one block of 64 columns to the next; else unused. eight_rows:
// the bytes from eight rows to the next eight.
DEVICE unsigned long long wgmma_descriptor(const void* shared, unsigned leading, unsigned eight_rows = 1024) {
  constexpr unsigned long long kSwizzle128 = 1ull << 62;
  const unsigned long long address = (target::shared_address(shared) >> 4) & 0x3FFF;
  return address | static_cast<unsigned long long>(leading >> 4) << 16 |
         static_cast<unsigned long long>(eight_rows >> 4) << 32 | kSwizzle128;
}

// The descriptor of a K-major operand without a swizzle, 32 bytes deep, that has rows of 16 bytes in memory, one after
// the other. Both halves of an operand's row are the same 16 bytes. The tile starts at a multiple of 16 bytes.
DEVICE unsigned long long repeated_descriptor(const void* shared) {
  constexpr unsigned long long kEightRows = 8 * 16;
  return (target::shared_address(shared) >> 4 & 0x3FFF) | kEightRows >> 4 << 32;
}

}  // namespace ptx
