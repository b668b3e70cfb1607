// Orders the sequences of a ragged batch for portable/forward.cu: the longest keys first. One thread a sequence finds
// its position, and how many query tiles come before it, by comparing itself with all others; no sort, no scan, one
// launch.
#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

namespace schedule {

constexpr int kThreads = 128;

struct Entry {
  int keys, tiles;
};

DEVICE Entry entry_of(const ScheduleParams& p, int sequence) {
  return {span_of(p.k_side, sequence).length, (span_of(p.q_side, sequence).length + p.tile_q - 1) / p.tile_q};
}

}  // namespace schedule

KERNEL LAUNCH_BOUNDS(schedule::kThreads, 1) void rawattn_schedule(PARAMETER ScheduleParams p) {
  using namespace schedule;
  SHARED_MEMORY(shared, kThreads * sizeof(Entry));
  Entry* const others = reinterpret_cast<Entry*>(shared);
  const int thread = target::thread_index();
  const int sequence = target::block_index() * kThreads + thread;
  Entry mine{0, 0};
  if (sequence < p.batch) mine = entry_of(p, sequence);
  int position = 0;
  int64 before = 0;
  for (int base = 0; base < p.batch; base += kThreads) {
    if (base + thread < p.batch) others[thread] = entry_of(p, base + thread);
    target::block_sync();
    const int count = p.batch - base < kThreads ? p.batch - base : kThreads;
    for (int i = 0; i < count; i++) {
      const bool earlier = others[i].keys > mine.keys || (others[i].keys == mine.keys && base + i < sequence);
      if (earlier) {
        position++;
        before += others[i].tiles;
      }
    }
    target::block_sync();
  }
  if (sequence < p.batch) {
    p.order[position] = sequence;
    // Sequences that unchecked integers lay over each other can have more tiles than an int counts.
    constexpr int64 kMost = 0x7fffffff;
    p.first_tile[position] = static_cast<int>(clamp(before, 0, kMost));
    if (position == p.batch - 1) p.first_tile[p.batch] = static_cast<int>(clamp(before + mine.tiles, 0, kMost));
  }
}
