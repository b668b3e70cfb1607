// Hopper's own instructions: on the GPU one line of PTX each, on the host what tests/shim does for them.
#pragma once

#if defined(RAWATTN_TARGET_HOST)
#include "ptx/host.cuh"
#else
#include "ptx/ballot.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/compute_here.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/load_shared.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/partial_copy.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#endif
