// A word by its address in shared memory and a constant that the instruction adds.
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
