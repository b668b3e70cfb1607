// The bulk tensor copy engine: one thread moves a box of a tensor, described by a map the host encoded, to shared
// memory.
#pragma once

#include "ptx/mbarrier.cuh"
#include "target/cuda.cuh"

namespace ptx {

struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

DEVICE void prefetch_tensormap(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Completes on `barrier` with the box's bytes; what lies outside the tensor arrives as zeros and counts too. With more
// than one receiver, in each of the cluster's first kReceivers blocks: at the same place, on the barrier at the same
// place.
template <int kReceivers = 1>
DEVICE void copy_tensor_5d(void* shared, const TensorMap* map, Mbarrier* barrier, int c0, int c1, int c2, int c3,
                           int c4) {
  if constexpr (kReceivers == 1) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
        "%7}], "
        "[%2];" ::"r"(target::shared_address(shared)),
        "l"(map), "r"(target::shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(target::shared_address(shared)),
        "l"(map), "r"(target::shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4),
        "h"(static_cast<unsigned short>((1 << kReceivers) - 1))
        : "memory");
  }
}

}  // namespace ptx
