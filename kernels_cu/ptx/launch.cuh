// Programmatic dependent launch: where the host allows it (`Step.early`), blocks come to a multiprocessor as soon as it
// has room, while kernels before theirs in the stream still run.
#pragma once

#include "target/cuda.cuh"

namespace ptx {

// The next kernel of the stream may come once all blocks of this one have said so, and there is room.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Until all kernels before this one in the stream are done and what they wrote is there: each thread, before it touches
// memory of theirs. It may ask for memory that it will read (target::prefetch).
DEVICE void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace ptx
