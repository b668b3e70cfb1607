// What all lanes of a warp say, as bits.
#pragma once

#include "target/cuda.cuh"

namespace ptx {

// Bit n: lane n's.
DEVICE unsigned ballot(bool predicate) { return __ballot_sync(~0u, predicate); }

}  // namespace ptx
