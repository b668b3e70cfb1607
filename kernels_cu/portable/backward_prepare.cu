// The first step of the backward (portable/backward_prepare.cuh) as a launch of its own. portable/backward_setup.cu has
// it beside the setup of a ragged call.
#include "portable/backward_prepare.cuh"

// Six blocks: with the registers of five, fewer rows are in flight.
KERNEL LAUNCH_BOUNDS(config::kThreads, 6) void rawattn_backward_prepare(PARAMETER BackwardParams p) {
  backward_prepare::prepare(p, target::block_index());
}
