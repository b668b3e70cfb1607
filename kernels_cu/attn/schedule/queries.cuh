// Which query tile of which head and sequence comes at which index of the schedule.
//
// Work begins in the order of its index, so the order of tiles is the schedule:
//   - sequences: the longest first (ragged batches), so that a long one never starts last;
//   - inside a sequence, heads in sections whose K and V fit the L2 cache together;
//   - inside a section, the query tile with the most visible keys first, its heads side by side.
// A dense batch may keep the shortest tiles of all sequences and heads for the end, the longest of them first: they
// fill the gaps that the last section leaves.
#pragma once

#include "attn/params.cuh"
#include "attn/schedule/order.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

struct WorkTile {
  bool exists;
  int sequence, head, tile;
  Span q, k;
};

// The tile at an index among those that a dense batch keeps for the end: the `deferred` first tiles of every head of
// every sequence, the longest of them first.
template <int kTileQ, int kHeads>
DEVICE WorkTile find_deferred_tile(const ForwardParams& p, int64 index, int deferred) {
  const int nheads = p.nheads_q / kHeads;
  const int64 heads = int64(p.batch) * nheads;
  const int head = static_cast<int>(index % heads);
  WorkTile work;
  work.exists = index < heads * deferred;
  work.sequence = head / nheads;
  work.head = head % nheads * kHeads;
  work.tile = deferred - 1 - static_cast<int>(index / heads);
  work.q = {0, static_cast<int>(p.q_side.rows)};
  work.k = {0, static_cast<int>(p.k_side.rows)};
  return work;
}

// A tile has kTileQ rows of each of kHeads neighbouring heads; work.head is the first of these. deferred: how many
// tiles of each head come after those of all heads that are not deferred. They are the first ones of the head, and only
// dense batches whose longest tile is the last (kLongestTileLast) defer any.
template <bool kRagged, bool kLongestTileLast, int kTileQ, int kHeads = 1, class Order>
DEVICE WorkTile find_work_tile(const ForwardParams& p, const Order& order, int64 index, int deferred = 0) {
  if constexpr (!kRagged && kLongestTileLast) {
    const int64 heads = int64(p.batch) * (p.nheads_q / kHeads);
    const int64 before = heads * ((p.q_side.rows + kTileQ - 1) / kTileQ - deferred);
    if (deferred > 0 && index >= before) return find_deferred_tile<kTileQ, kHeads>(p, index - before, deferred);
  }
  WorkTile work;
  find_sequence<kRagged, false, kTileQ>(p, order, p.nheads_q / kHeads, index, work, deferred);
  if (!work.exists) return work;
  const int tiles = (work.q.length + kTileQ - 1) / kTileQ;
  const int group = p.nheads_q / p.nheads_kv / kHeads;
  const HeadTile found = find_head(index, tiles - deferred, p.nheads_kv, group, work.k.length, p.section_keys);
  work.head = found.head * kHeads;
  work.tile = found.tile;
  work.exists = work.tile < tiles;  // may be false: unchecked lengths can make a schedule that does not add up
  if constexpr (kLongestTileLast) work.tile = tiles - 1 - work.tile;
  return work;
}
