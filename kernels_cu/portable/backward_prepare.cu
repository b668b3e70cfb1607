// The first step of the backward (portable/backward_prepare.cuh) as a launch of its own. portable/backward_setup.cu has
// it beside the setup of a ragged call.
#include "portable/backward_prepare.cuh"

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_backward_prepare(PARAMETER BackwardParams p) {
  backward_prepare::prepare(p, target::block_index());
}
