// The producer of a Hopper forward block: one thread walks the schedule and keeps the copy engine ahead of the
// consumers.
#pragma once

#include "sm90/forward_block.cuh"

namespace forward {

// kSharers: blocks that take turns at copying columns to all of them; every one's barrier waits for the whole. `row`
// must be one of the sequence's: for a box that lies wholly outside its map, the copy engine touches the map's origin,
// which is no memory of ours where the map is ragged.
template <int kBlocks, int kRows, int kSharers>
DEVICE void load_rows(unsigned char* shared, const ptx::TensorMap* map, ptx::Mbarrier* barrier, const MapRows& rows,
                      int row, int head) {
  ptx::mbarrier_arrive_expect(barrier, kBlocks * kRows * 128);
  UNROLL for (int b = 0; b < kBlocks; b++) {
    if (kSharers > 1 && b % kSharers != rank()) continue;
    ptx::copy_tensor_5d<kSharers>(shared + b * kRows * 128, map, barrier, b * kColumns, rows.first + row, head,
                                  rows.outer, rows.batch);
  }
}

// Tickets are places in the schedule. The first block of a cluster draws them, and tells all of its blocks.
struct Tickets {
  unsigned parity = 0;

  // A lone block's ticket is on its way when this returns.
  DEVICE unsigned draw(const Sm90ForwardParams& p, SharedMemory& s) const {
    if (rank() != 0) return 0;
    const unsigned ticket = target::fetch_add(p.next_work, 1u);
    if constexpr (kCluster > 1) {
      ptx::mbarrier_wait(&s.ticket_empty, parity);
      for (int to = 0; to < kCluster; to++) ptx::send(&s.ticket, ticket, &s.ticket_full, to);
    }
    return ticket;
  }
  DEVICE unsigned receive(SharedMemory& s, unsigned ticket) {
    if constexpr (kCluster > 1) {
      ptx::mbarrier_arrive_expect(&s.ticket_full, sizeof(ticket));
      ptx::mbarrier_wait(&s.ticket_full, parity);
      parity ^= 1;
      ticket = s.ticket;
    }
    return ticket;
  }
  // Nobody needs the last ticket any more, if there was one: not when it was read, but when its work was found with it,
  // as the arrival orders nothing.
  DEVICE void spent(SharedMemory& s) const {
    if constexpr (kCluster > 1) ptx::mbarrier_arrive_at(&s.ticket_empty, 0);
  }
};

DEVICE void find(PartialWork& work, const Sm90ForwardParams& p, int64 index, bool second) {
  find_partial_work<kClusterQ, kTileK, kHeadsPerTile>(work, p.forward, p.shared_out, index, second);
}
DEVICE void find(Work& work, const Sm90ForwardParams& p, int64 index, bool) {
  work = find_work<kRagged, kRight, kClusterQ, kHeadsPerTile>(p.forward, index, p.kept_tiles);
}
DEVICE bool goes_on(const PartialWork& work) { return work.goes_on; }
DEVICE bool goes_on(const Work&) { return false; }

DEVICE void produce(const Sm90ForwardParams& p, const Maps& maps, SharedMemory& s) {
  Ring<kStages> keys, values;
  Ring<2> slot;
  Tickets tickets;
  unsigned queries_parity = 0;
  int64 index = target::block_index() / kCluster;
  bool second = false;  // of the two items that a ticket may stand for
  for (;;) {
    ptx::mbarrier_wait(&s.work_empty[slot.slot], slot.parity ^ 1);
    Item& work = s.work[slot.slot];
    find(work, p, index, second);
    ptx::mbarrier_arrive(&s.work_full[slot.slot]);
    slot.advance();
    if (!second) tickets.spent(s);
    if (!work.exists) break;
    const Keys key_tiles = key_tiles_of(p.forward, work);
    const TileSpan span = span_of_item(key_tiles, work);
    const int kv_head = work.head / (p.forward.nheads_q / p.forward.nheads_kv);
    const MapRows q_rows = map_rows(work, work.q, p.row_bound_q);
    const MapRows k_rows = map_rows(work, work.k, p.row_bound_k);
    const auto load_values = [&](int n) {
      ptx::mbarrier_wait(&s.values_empty[values.slot], values.parity ^ 1);
      load_rows<kBlocksV, kTileK, kCluster>(s.values[values.slot], &maps.v, &s.values_full[values.slot], k_rows,
                                            key_tiles.first_key(n), kv_head);
      values.advance();
    };
#pragma unroll 1
    for (int n = span.begin; n < span.end; n++) {
      ptx::mbarrier_wait(&s.keys_empty[keys.slot], keys.parity ^ 1);
      load_rows<kBlocksQk, kTileK, kCluster>(s.keys[keys.slot], &maps.k, &s.keys_full[keys.slot], k_rows,
                                             key_tiles.first_key(n), kv_head);
      keys.advance();
      if (n == span.begin) {
        ptx::mbarrier_wait(&s.queries_empty, queries_parity ^ 1);
        queries_parity ^= 1;
        // At a sequence's end a later block of the cluster may have no rows of its own.
        const int first = first_query(work);
        const int row = kCluster == 1 || first < work.q.length ? first : 0;
        load_rows<kBlocksQk, kTileRows, 1>(s.queries, &maps.q, &s.queries_full, q_rows, row, work.head);
      } else {
        load_values(n - 1);
      }
    }
    second = goes_on(work);
    if (second) {
      load_values(span.end - 1);
      continue;
    }
    // Not earlier: work goes to whoever is done first, and consumers are still busy with what is loaded.
    const unsigned ticket = tickets.draw(p, s);
    if (span.end > 0) load_values(span.end - 1);
    index = int64(tickets.receive(s, ticket)) + target::grid_size() / kCluster;
  }
  // The last block to run out of work leaves the counters as it found them, for the next launch.
  if (target::fetch_add(p.next_work + 1, 1u) == target::grid_size() - 1) {
    p.next_work[0] = 0;
    p.next_work[1] = 0;
  }
}

}  // namespace forward
