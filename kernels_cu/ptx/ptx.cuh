// Hopper's own instructions, one function for each: PTX on the GPU, calls of the simulated GPU of tests/shim on the
// host.
#pragma once

#if defined(RAWATTN_TARGET_HOST)
#include "ptx/host.cuh"
#else
#include "ptx/ballot.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/fence.cuh"
#include "ptx/pin_computation.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/load_shared.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/partial_copy.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#endif
