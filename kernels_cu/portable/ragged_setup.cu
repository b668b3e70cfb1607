// The setup of a ragged call (portable/ragged_setup.cuh) whose lengths are all in GPU memory.
#include "portable/ragged_setup.cuh"

KERNEL LAUNCH_BOUNDS(ragged_setup::kThreads, 1) void rawattn_ragged_setup(PARAMETER RaggedSetupParams p) {
  using namespace ragged_setup;
  target::launch_dependents();
  target::wait_for_prior_kernels();
  SHARED_MEMORY(shared, kSharedBytes);
  run(p, target::block_index(), InMemory{}, shared);
}
