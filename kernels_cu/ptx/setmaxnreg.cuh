// setmaxnreg: a warpgroup gives registers back to the block's pool, or takes some from it. kRegisters: of a thread,
// afterwards.
#pragma once

#include "target/cuda.cuh"

namespace ptx {

template <int kRegisters>
DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace ptx
