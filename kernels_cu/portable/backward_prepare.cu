// The first step of the backward, alone.
#include "portable/backward_prepare.cuh"

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_backward_prepare(PARAMETER BackwardParams p) {
  backward_prepare::prepare(p, target::block_index());
}
