// The setup of a ragged call whose lengths are all in memory.
#include "portable/ragged_setup.cuh"

namespace ragged_setup {

struct InMemory {
  DEVICE Side operator()(const Side& side) const { return side; }
};

}  // namespace ragged_setup

KERNEL LAUNCH_BOUNDS(ragged_setup::kThreads, 1) void rawattn_ragged_setup(PARAMETER RaggedSetupParams p) {
  using namespace ragged_setup;
  target::launch_dependents();
  target::wait_for_prerequisites();
  SHARED_MEMORY(shared, kSharedBytes);
  run(p, InMemory{}, shared);
}
