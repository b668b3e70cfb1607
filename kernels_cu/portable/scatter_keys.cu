// The last step of a backward on gathered keys (portable/kept_setup.cu): writes dk and dv of all keys, which are those
// of the kept keys and zeros elsewhere. One wave takes the rows of one key in both arrays. Where all heads share a
// list, it searches the list for the key once.
#include "attn/kept_rows.cuh"

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_scatter_keys(PARAMETER KeptRowsParams p) {
  using namespace kept_rows;
  const int lane = target::thread_index() % target::kWave;
  const int64 index = int64(target::block_index()) * kWaves + target::thread_index() / target::kWave;
  const int64 batch = index / p.kept.rows;
  if (batch >= p.batch) return;
  const int key = static_cast<int>(index - batch * p.kept.rows);
  const bool shared = p.kept.head == 0;
  const int of_all = shared ? KeptList(p.kept, batch, 0).entry(key) : -1;
  const auto entry_of = [&](int head) { return shared ? of_all : KeptList(p.kept, batch, head).entry(key); };
  Keys{p.k, p.kept, p.nheads}.scatter(batch, key, entry_of, lane);
  Values{p.v, p.kept, p.nheads}.scatter(batch, key, entry_of, lane);
}
