// Fences of memory.
#pragma once

#include "target/cuda.cuh"

namespace ptx {

// Orders this thread's accesses to memory for all blocks of the device: reads after the fence are not made before reads
// in front of it. Unlike target::fence_device() it is not sequentially consistent, and takes less time.
DEVICE void fence_acq_rel_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace ptx
