// The first piece of work of a Hopper forward block. The block's first warp finds it while earlier kernels of the
// stream still run: it takes up to 3 us, a large part of a short call.
//
// Work is found from lengths, which may lie in memory that an earlier kernel writes. So the warp looks at them again
// once earlier kernels are done, and if they have changed, it finds the work again. Whatever they were before, a
// sequence lies inside its array (attn/sequence.cuh).
#pragma once

#include "sm90/forward_producer.cuh"
#include "sm90/forward_work.cuh"

namespace forward {

// Whether work follows from more in memory than lengths: lists of a mask, an order of sequences, positions, or where
// the pages of a sequence begin in a table.
DEVICE bool work_follows_from_memory(const ForwardParams& p) {
  if (kBlockMask || kPositions) return true;
  return kRagged && (p.order != nullptr || (kPaged && p.pages.indptr.data != nullptr));
}

// What the warp needs until queries are loaded, in their place.
struct FirstWorkRoom {
  SeenLengths<kRagged> lengths;
  alignas(16) unsigned char order[target::kWave * 8];
};
static_assert(sizeof(FirstWorkRoom) <= kQueryBytes, "it is their place");

// Finds the first work in a given order. Called by the lanes of the first warp. first: its slot.
template <class Work>
DEVICE void find_first_work(const Params& p, SharedMemory& s, Work& first, const SeenOrder& order, int lane) {
  const int64 own = target::block_index() / kCluster;
  if constexpr (kStreamK) {
    StreamLine line = find_line(p, order, lane);
    Work work;
    const unsigned left = kRagged && line.tiles == 0 ? line.left(workers()) : 0;
    bool cut = left == 0;
    if constexpr (kRagged && !kBlockMask) {
      if (!cut && left == line.whole) {  // all tiles are split: this takes a fifth of the time of find()
        line.cut(p.stream_k, workers(), left, key_tiles_of_first(p, order));
        cut = true;
      }
    }
    // Not unrolled, so that the same instructions find the first tile of the line and then the work: instructions that
    // run once take about as long to fetch as to execute.
#pragma unroll 1
    for (;; cut = true) {
      find(work, p, order, line, cut ? own : line.whole - left, -1);
      if (cut) break;
      line.cut(p.stream_k, workers(), left, work.exists ? work.keys.count() : 0);
    }
    if (lane > 0) return;
    s.line = line;
    first = work;
  } else {
    if (lane > 0) return;
    find(first, p, order, s.line, own, -1);
  }
  set_origin(first, nullptr);
}

// Waits for earlier kernels, and finds the block's first work. Called by the lanes of the first warp.
DEVICE void find_first_work(const Params& p, SharedMemory& s, int lane) {
  FirstWorkRoom& room = *reinterpret_cast<FirstWorkRoom*>(s.queries[0]);
  const bool own_order = kRagged && p.forward.order == nullptr;
  bool prior_done = work_follows_from_memory(p.forward);
  if (prior_done) target::wait_for_prior_kernels();
  if (own_order) room.lengths.look(p, lane);
  for (;;) {
    target::wave_sync();
    if (own_order) s.own_order.find(p, room.lengths, room.order);
    find_first_work(p, s, s.work[0], SeenOrder{p.forward.order, s.own_order, p, &room.lengths}, lane);
    if (prior_done) break;
    target::wait_for_prior_kernels();
    prior_done = true;
    target::wave_sync();
    if (!target::wave_any(own_order && room.lengths.look(p, lane))) break;
  }
  if constexpr (kRagged) ptx::fence_async_proxy();  // TMA writes to the room next
}

}  // namespace forward
