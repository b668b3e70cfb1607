// mbarrier: a counter in shared memory whose phase completes when all arrivals, and all announced bytes, have come.
#pragma once

#include "target/cuda.cuh"

namespace ptx {

typedef unsigned long long Mbarrier;

DEVICE void mbarrier_init(Mbarrier* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(target::shared_address(barrier)), "r"(arrivals)
               : "memory");
}
// Makes initialised barriers visible to TMA; a block barrier must follow.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// A barrier is given by a pointer, or by an address in shared memory plus a constant that the instruction itself adds.
// With the constant, one register serves several barriers of a slot.
template <int kOffset>
DEVICE void mbarrier_arrive(unsigned address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0 + %1];" ::"r"(address), "n"(kOffset) : "memory");
}
DEVICE void mbarrier_arrive(Mbarrier* barrier) { mbarrier_arrive<0>(target::shared_address(barrier)); }
// Arrives, and announces bytes that copies must deliver before the phase can complete.
DEVICE void mbarrier_arrive_expect(Mbarrier* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(target::shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
// Arrives, without waiting here, once all cp.async copies that this thread has issued have landed.
DEVICE void mbarrier_arrive_behind_copies(Mbarrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(target::shared_address(barrier))
               : "memory");
}
// Returns once the phase of this parity has completed. A fresh barrier is in phase 0: waiting for parity 1 passes at
// once.
template <int kOffset>
DEVICE void mbarrier_wait(unsigned address, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "RETRY:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0 + %2], %1;\n"
      "@!done bra RETRY;\n"
      "}\n" ::"r"(address),
      "r"(parity), "n"(kOffset)
      : "memory");
}
DEVICE void mbarrier_wait(Mbarrier* barrier, unsigned parity) {
  mbarrier_wait<0>(target::shared_address(barrier), parity);
}

}  // namespace ptx
