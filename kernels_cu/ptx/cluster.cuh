// Clusters: neighbouring blocks that run at the same time and reach each other's shared memory.
#pragma once

#include "ptx/mbarrier.cuh"
#include "target/cuda.cuh"

namespace ptx {

DEVICE int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster meet.
DEVICE void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// The address, in the shared memory of the cluster, of what lies at the offset of `pointer` in the block `rank`.
DEVICE unsigned address_in(const void* pointer, int rank) {
  unsigned address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(target::shared_address(pointer)), "r"(rank));
  return address;
}

// Arrives at the barrier at this offset in the block `rank`. The arrival is relaxed and orders no memory accesses,
// since a release at cluster scope would be a fence of all memory. So it is for slots that were only read, by products
// that have been waited for.
DEVICE void mbarrier_arrive_at(Mbarrier* barrier, int rank) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, rank))
               : "memory");
}

// Stores x at the offset of `to` in the block `rank`, and completes 4 bytes on the barrier at this offset there.
DEVICE void send(unsigned* to, unsigned x, Mbarrier* barrier, int rank) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address_in(to, rank)),
               "r"(x), "r"(address_in(barrier, rank))
               : "memory");
}

}  // namespace ptx
