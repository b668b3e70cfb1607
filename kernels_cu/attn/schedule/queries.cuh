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

// The sequence at a position of the order. Behind the last one work.exists is false.
template <bool kRagged, class Order>
DEVICE void find_position(const ForwardParams& p, const Order& order, int position, WorkTile& work) {
  work.exists = position < p.batch;
  if constexpr (kRagged) {
    const OrderedSequence found = order.at(p, work.exists ? position : 0);
    work.sequence = found.sequence;
    work.q = {found.tiled_start, found.tiled_length};
    work.k = {found.other_start, found.other_length};
  } else {
    work.sequence = position;
    work.q = {0, static_cast<int>(p.q_side.rows)};
    work.k = {0, static_cast<int>(p.k_side.rows)};
  }
}

// The longest query tile of a ragged batch, or the shortest, but for the last tile of each head. All sequences must
// have equally many tiles, two or more. It is one of the first head.
template <bool kRagged, bool kLongestTileLast, int kTileQ, class Order>
DEVICE WorkTile find_end(const ForwardParams& p, const Order& order, bool longest) {
  WorkTile work;
  find_position<kRagged>(p, order, longest ? 0 : p.batch - 1, work);
  work.head = 0;
  work.tile = longest && kLongestTileLast ? (work.q.length + kTileQ - 1) / kTileQ - 2 : 0;
  return work;
}

// A tile has kTileQ rows of each of kHeads neighbouring heads; work.head is the first of these. deferred: how many
// tiles of each head come after those of all heads that are not deferred. They are the first ones of the head, and only
// dense batches whose longest tile is the last (kLongestTileLast) defer any.
//
// last_tiles: the last sequence of a ragged batch comes in so few sections that each has this many tiles. In a section
// the longest tiles come first. So none of them begins when most blocks have nothing left to do. Where most keys come
// before the queries, tiles are alike, and small sections read keys less often.
//
// apart: unless 0, the last tile of each head comes behind all others of all heads. All sequences must have this many
// tiles then, two or more.
template <bool kRagged, bool kLongestTileLast, int kTileQ, int kHeads = 1, class Order>
DEVICE WorkTile find_work_tile(const ForwardParams& p, const Order& order, int64 index, int deferred = 0,
                               int last_tiles = 0, int apart = 0) {
  if constexpr (!kRagged && kLongestTileLast) {
    const int64 heads = int64(p.batch) * (p.nheads_q / kHeads);
    const int64 before = heads * ((p.q_side.rows + kTileQ - 1) / kTileQ - deferred);
    if (deferred > 0 && index >= before) return find_deferred_tile<kTileQ, kHeads>(p, index - before, deferred);
  }
  WorkTile work;
  const int nheads = p.nheads_q / kHeads;
  bool is_last = false;
  if (apart > 0) {
    const int last = apart - 1;
    const int64 before = int64(p.batch) * nheads * last;
    const bool behind = index >= before;
    if (behind) index -= before;
    const int64 of_sequence = int64(nheads) * (behind ? 1 : last);
    const int position = index < of_sequence ? 0 : static_cast<int>(index / of_sequence);
    index -= position * of_sequence;
    find_position<kRagged>(p, order, position, work);
    if (behind) {
      work.head = static_cast<int>(index) * kHeads;
      work.tile = last;
      return work;
    }
  } else {
    is_last = find_sequence<kRagged, false, kTileQ>(p, order, nheads, index, work, deferred);
  }
  if (!work.exists) return work;
  const int tiles = (work.q.length + kTileQ - 1) / kTileQ - (apart > 0);
  int sections = sections_of(p.nheads_kv, work.k.length, p.section_keys);
  if (last_tiles > 0 && is_last && work.k.length / 2 <= work.q.length) {
    const int most = static_cast<int>(static_cast<unsigned>(nheads) * tiles / last_tiles);  // any is right if it wraps
    sections = most < 1 ? 1 : most < sections ? most : sections;
  }
  const HeadTile found = find_head(index, tiles - deferred, nheads, p.nheads_kv, sections);
  work.head = found.head * kHeads;
  work.tile = found.tile;
  work.exists = work.tile < tiles;  // may be false: unchecked lengths can make a schedule that does not add up
  if constexpr (kLongestTileLast) work.tile = tiles - 1 - work.tile;
  return work;
}
