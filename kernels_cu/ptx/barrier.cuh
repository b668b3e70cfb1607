// Named barriers. Every target has them, so they are those of target/.
#pragma once

#include "target/cuda.cuh"

namespace ptx {

using target::barrier_arrive;
using target::barrier_sync;

}  // namespace ptx
