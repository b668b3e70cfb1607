// Copies the rows of kept keys next to each other. One wave takes one row, all heads; an entry that is no key becomes
// zeros.
#include "attn/kept_rows.cuh"

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_gather_keys(PARAMETER KeptRowsParams p) {
  using namespace kept_rows;
  const int64 index = wave_index();
  const int64 batch = index / p.kept.count;
  if (batch >= p.batch) return;
  const int entry = static_cast<int>(index - batch * p.kept.count);
  const auto from = [&](int head, int byte) -> const void* {
    const int key = KeptList(p.kept, batch, head).key(entry);
    if (key < 0) return nullptr;
    return static_cast<const char*>(p.from) + offset(p.strides, batch, key, head) + byte;
  };
  const auto to = [&](int head, int byte) -> void* {
    return static_cast<char*>(p.to) + (index * p.nheads + head) * kPitch + byte;
  };
  copy_row(p.nheads, from, to);
}
