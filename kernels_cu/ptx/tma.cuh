// TMA, the bulk tensor copies: one thread moves a box of a tensor, described by a map the host encoded, to shared
// memory or from there.
#pragma once

#include "ptx/mbarrier.cuh"
#include "target/cuda.cuh"

namespace ptx {

struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

DEVICE void prefetch_tensormap(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Loads a box to shared memory, and completes its bytes on `barrier`. What lies outside the tensor arrives as zeros and
// counts too. With more than one receiver, the box goes to each of the cluster's first kReceivers blocks: to the same
// offset, and on the barrier at the same offset.
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

// Loads a box to this block that nobody reads again: the L2 cache evicts it first.
DEVICE void copy_tensor_5d_evict_first(void* shared, const TensorMap* map, Mbarrier* barrier, int c0, int c1, int c2,
                                       int c3, int c4) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(target::shared_address(shared)),
      "l"(map), "r"(target::shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}

// Asks for a box in the L2 cache.
DEVICE void prefetch_tensor_5d(const TensorMap* map, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(c0),
               "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// Orders this thread's accesses to shared memory before those of TMA and wgmma that follow: what it has written is
// visible to them. If another thread issues the copy or the product, the two threads must synchronise in between.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Stores a box. What lies outside the tensor is left alone. `shared` may be written again once this thread has
// committed its stores (commit_stores) and waited until TMA has read them (wait_stores_read).
DEVICE void store_tensor_5d(const TensorMap* map, const void* shared, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(target::shared_address(shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the committed stores are done: other accesses to what they wrote may follow.
DEVICE void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
DEVICE void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace ptx
