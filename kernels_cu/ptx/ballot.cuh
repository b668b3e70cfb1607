// The predicates of all lanes of a warp as the bits of a word.
#pragma once

#include "target/cuda.cuh"

namespace ptx {

// Bit n is the predicate of lane n. All lanes take part.
DEVICE unsigned ballot(bool predicate) { return __ballot_sync(~0u, predicate); }

}  // namespace ptx
