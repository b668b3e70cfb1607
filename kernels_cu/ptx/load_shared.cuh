// Loads a word from an address in shared memory plus a constant that the instruction itself adds.
#pragma once

#include "target/cuda.cuh"

namespace ptx {

template <int kOffset>
DEVICE unsigned load_shared(unsigned address) {
  unsigned x;
  asm volatile("ld.shared.b32 %0, [%1 + %2];" : "=r"(x) : "r"(address), "n"(kOffset) : "memory");
  return x;
}

}  // namespace ptx
