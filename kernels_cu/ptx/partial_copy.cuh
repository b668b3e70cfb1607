// A copy that reads less than it writes.
#pragma once

#include "target/cuda.cuh"

namespace ptx {

// The first `readable` of 16 bytes, from 0 to all of them, and zeros behind those. The rest of them is not read.
DEVICE void copy_async_partly(unsigned shared, const void* global, int readable) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(readable)
               : "memory");
}

}  // namespace ptx
