// Named barriers are every target's.
#pragma once

#include "target/cuda.cuh"

namespace ptx {

using target::barrier_arrive;
using target::barrier_sync;

}  // namespace ptx
