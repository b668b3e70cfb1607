// The setup of a ragged call (portable/ragged_setup.cuh) and the first step of its backward
// (portable/backward_prepare.cuh) in one launch, by different blocks: neither reads what the other writes.
#include "portable/backward_prepare.cuh"
#include "portable/ragged_setup.cuh"

static_assert(config::kThreads == ragged_setup::kThreads, "blocks of both are in one launch");

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_backward_setup(PARAMETER BackwardSetupParams p) {
  const int block = target::block_index();
  if (block >= p.setup_blocks) {
    backward_prepare::prepare(p.backward, block - p.setup_blocks);
    return;
  }
  SHARED_MEMORY(shared, ragged_setup::kSharedBytes);
  ragged_setup::run(p.setup, block, ragged_setup::InMemory{}, shared);
}
