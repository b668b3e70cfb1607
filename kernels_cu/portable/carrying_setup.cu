// The setup of a ragged call (portable/ragged_setup.cuh) whose host lengths travel in the kernel's parameters. One
// block writes them to memory for later kernels. The blocks of this launch cannot wait for that, so they read the
// parameters.
#include "portable/ragged_setup.cuh"

namespace ragged_setup {

// The `found` of run(): addresses in the memory that the lengths are written to become addresses in the parameters.
struct InParameters {
  const CarryingSetupParams& p;

  DEVICE const void* here(const void* data) const {
    const auto at = reinterpret_cast<unsigned long long>(data);
    const auto to = reinterpret_cast<unsigned long long>(p.to);
    return at < to || at >= to + 4ull * p.count ? data : p.words + (at - to) / 4;
  }
  DEVICE Side operator()(Side side) const {
    side.start.data = here(side.start.data);
    side.length.data = here(side.length.data);
    return side;
  }
};

}  // namespace ragged_setup

KERNEL LAUNCH_BOUNDS(ragged_setup::kThreads, 1) void rawattn_carrying_setup(PARAMETER CarryingSetupParams p) {
  using namespace ragged_setup;
  target::launch_dependents();
  target::wait_for_prior_kernels();
  SHARED_MEMORY(shared, kSharedBytes);
  if (target::block_index() == 0) {
    for (int i = target::thread_index(); i < p.count; i += kThreads) p.to[i] = p.words[i];
  }
  run(p.setup, target::block_index(), InParameters{p}, shared);
}
