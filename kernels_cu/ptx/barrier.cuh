// Named barriers, which portable kernels have too: see target/.
#pragma once

#include "target/cuda.cuh"

namespace ptx {

using target::barrier_arrive;
using target::barrier_sync;

}  // namespace ptx
