// The producer of a Hopper forward block: one thread walks the schedule and keeps the copy engine ahead of the
// consumers.
#pragma once

#include "sm90/forward_bias.cuh"
#include "sm90/forward_block.cuh"
#include "sm90/forward_pages.cuh"

namespace forward {

DEVICE void find(WorkItem& work, const Sm90ForwardParams& p, int64 index, bool second) {
  find_work_item<kClusterQ, kTileK, kHeadsPerTile>(work, p.forward, p.stream_k, index, second);
}
DEVICE void find(WorkTile& work, const Sm90ForwardParams& p, int64 index, bool) {
  work = find_work_tile<kRagged, kRight, kClusterQ, kHeadsPerTile>(p.forward, index, p.kept_tiles);
}
DEVICE bool goes_on(const WorkItem& work) { return work.goes_on; }
DEVICE bool goes_on(const WorkTile&) { return false; }

DEVICE void produce(const Sm90ForwardParams& p, const Maps& maps, SharedMemory& s) {
  Ring<kStages> keys, values;
  Ring<kBiasSlots> bias;
  Ring<2> slot;
  Tickets<kCluster> tickets(p.next_work, s.tickets);
  unsigned queries_parity = 0;
  int64 index = target::block_index() / kCluster;
  bool second = false;  // of the two items that a ticket may stand for
  for (;;) {
    ptx::mbarrier_wait(&s.work_empty[slot.slot], slot.parity ^ 1);
    Item& work = s.work[slot.slot];
    find(work, p, index, second);
    if constexpr (kPaged) {
      if (work.exists) work.k.length = length_in_pages(p.forward.pages, work.sequence, work.k.length);
    }
    ptx::mbarrier_arrive(&s.work_full[slot.slot]);
    slot.advance();
    if (!second) tickets.spent();
    if (!work.exists) break;
    const Keys key_tiles = key_tiles_of(p.forward, work);
    const TileSpan span = span_of_item(key_tiles, work);
    const int kv_head = work.head / (p.forward.nheads_q / p.forward.nheads_kv);
    const MapRows q_rows = map_rows(work, work.q, p.row_bound_q);
    // At a sequence's end a later block of the cluster may have no rows of its own.
    const int first_row = kCluster == 1 || first_query(work) < work.q.length ? first_query(work) : 0;
    const KeyTileLoader<kPageRows> loader(p, work);
    const auto load_values = [&](int n) {
      ptx::mbarrier_wait(&s.values_empty[values.slot], values.parity ^ 1);
      loader.load<kBlocksV>(s.values[values.slot], &maps.v, &s.values_full[values.slot], key_tiles.first_key(n),
                            kv_head);
      values.advance();
    };
#pragma unroll 1
    for (int n = span.begin; n < span.end; n++) {
      ptx::mbarrier_wait(&s.keys_empty[keys.slot], keys.parity ^ 1);
      loader.load<kBlocksQk>(s.keys[keys.slot], &maps.k, &s.keys_full[keys.slot], key_tiles.first_key(n), kv_head);
      keys.advance();
      if (n == span.begin) {
        ptx::mbarrier_wait(&s.queries_empty, queries_parity ^ 1);
        queries_parity ^= 1;
        load_rows<kBlocksQk, kTileRows, 1>(s.queries, &maps.q, &s.queries_full, q_rows, first_row, work.head);
      } else {
        load_values(n - 1);
      }
      // Behind what is wanted first: consumers ask for it when the tile's products are under way.
      if constexpr (kBiasByEngine) {
        load_bias(p.forward, maps, s, work, bias, first_row, key_tiles.first_key(n));
      }
    }
    second = goes_on(work);
    if (second) {
      load_values(span.end - 1);
      continue;
    }
    // Not earlier: work goes to whoever is done first, and consumers are still busy with what is loaded.
    const unsigned ticket = tickets.draw();
    if (span.end > 0) load_values(span.end - 1);
    index = int64(tickets.receive(ticket)) + target::grid_size() / kCluster;
  }
  tickets.leave();
}

}  // namespace forward
