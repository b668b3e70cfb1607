// The launch before attention on gathered keys, which are the keys that a BlockMask keeps in lists that its rows share.
// Some blocks copy the kept rows of keys or of values, others write the mask of which of them each row sees, make the
// lists of tiles, or count the keys of each list.
#include "attn/kept_rows.cuh"
#include "portable/kept_lists.cuh"
#include "portable/kept_mask.cuh"

namespace kept_setup {

using namespace config;

// Whether this block is one of the next `blocks` blocks of the launch. If not, `block` becomes its index among those
// behind them.
DEVICE bool is_among_next(int blocks, int& block) {
  if (block < blocks) return true;
  block -= blocks;
  return false;
}

// Copies kept rows of keys or of values, one row a wave.
template <class Rows>
DEVICE void gather(const KeptRowsParams& p, const KeptArray& array, int block) {
  const int lane = target::thread_index() % target::kWave;
  const int64 index = int64(block) * kept_rows::kWaves + target::thread_index() / target::kWave;
  const int64 batch = index / p.kept.count;
  if (batch >= p.batch) return;
  Rows{array, p.kept, p.nheads}.gather(batch, static_cast<int>(index - batch * p.kept.count), lane);
}

// Writes how many keys a list has: behind the first entry that is no key, no entry is a key.
DEVICE void count(const KeptLengths& p, const KeptKeys& kept, int block) {
  const int64 index = int64(block) * kThreads + target::thread_index();
  if (index >= p.lists) return;
  p.lengths[index] = KeptList(kept, index / p.nheads, static_cast<int>(index % p.nheads)).length();
}

}  // namespace kept_setup

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_kept_setup(PARAMETER KeptSetupParams p) {
  using namespace kept_setup;
  target::launch_dependents();
  target::wait_for_prior_kernels();
  const KeptKeys& kept = p.rows.kept;
  int block = target::block_index();
  // Blocks that read many entries one after the other come first.
  if (is_among_next(p.lists0.blocks, block)) return kept_lists::make(p.lists0, kept, p.limits, block);
  if (is_among_next(p.lists1.blocks, block)) return kept_lists::make(p.lists1, kept, p.limits, block);
  if (is_among_next(p.lengths.blocks, block)) return count(p.lengths, kept, block);
  if (is_among_next(p.mask.blocks, block)) return kept_mask::write(p.mask, kept, p.limits, block);
  if (is_among_next(p.gather_blocks, block)) return gather<kept_rows::Keys>(p.rows, p.rows.k, block);
  gather<kept_rows::Values>(p.rows, p.rows.v, block);
}
