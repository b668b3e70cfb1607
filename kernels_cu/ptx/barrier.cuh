// Named barriers: some of a block's warps wait (sync) for arrivals of all `threads`, others only announce theirs
// (arrive).
#pragma once

#include "target/cuda.cuh"

namespace ptx {

DEVICE void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace ptx
