// Writes an array of all keys: the rows of those that are kept, zeros elsewhere. One wave takes one row, all heads.
#include "attn/kept_rows.cuh"

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_scatter_keys(PARAMETER KeptRowsParams p) {
  using namespace kept_rows;
  const int64 index = wave_index();
  const int64 batch = index / p.kept.rows;
  if (batch >= p.batch) return;
  const int row = static_cast<int>(index - batch * p.kept.rows);
  const bool shared = p.kept.head == 0;
  const int of_all = shared ? KeptList(p.kept, batch, 0).entry(row) : -1;
  const auto from = [&](int head, int byte) -> const void* {
    const int entry = shared ? of_all : KeptList(p.kept, batch, head).entry(row);
    if (entry < 0) return nullptr;
    return static_cast<const char*>(p.from) + ((batch * p.kept.count + entry) * p.nheads + head) * kPitch + byte;
  };
  const auto to = [&](int head, int byte) -> void* {
    return static_cast<char*>(p.to) + offset(p.strides, batch, row, head) + byte;
  };
  copy_row(p.nheads, from, to);
}
