// An asynchronous copy (cp.async) of 16 bytes that reads fewer and fills the rest with zeros.
#pragma once

#include "target/cuda.cuh"

namespace ptx {

// Copies the first `readable` of 16 bytes, 0 to 16, and writes zeros for the rest, which is not read.
DEVICE void copy_async_partly(unsigned shared, const void* global, int readable) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(readable)
               : "memory");
}

}  // namespace ptx
