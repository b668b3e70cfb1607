// Which query tile of which head and sequence comes at which index of the schedule.
//
// Work is begun in the order of its index, so the order of tiles is the schedule:
//   - sequences: the longest first (ragged batches), so that a long one never starts last;
//   - inside a sequence, heads in sections whose K and V fit the L2 cache together;
//   - inside a section, the query tile with the most visible keys first, its heads side by side.
// A dense batch may keep the shortest tiles of all sequences and heads for the end, the longest of them first: they
// fill the gaps that the last section leaves.
#pragma once

#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

struct Work {
  bool exists;
  int sequence, head, tile;
  Span q, k;
};

// The last place in the schedule whose first tile is not beyond `tile`.
DEVICE int place_of(const int* first_tile, int batch, int tile) {
  int low = 0;
  int high = batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_tile[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Finds the sequence of `index`, of which what is left is the place among the sequence's tiles and heads. Tiles of
// kTile rows are those of one side, `heads` its heads.
//
// Where there is no such sequence, some other one is found: leaving early instead costs the backward, which fills all
// registers, a hundred bytes of spills and up to a tenth of its speed.
//
// kept: tiles of each head of a dense batch that do not come here.
template <bool kRagged, int kTile, class Work>
DEVICE void find_sequence(const ForwardParams& p, const Side& tiled, int heads, int64& index, Work& work,
                          int kept = 0) {
  if constexpr (kRagged) {
    const int tile = static_cast<int>(index / heads);
    work.exists = tile < p.first_tile[p.batch];
    const int place = place_of(p.first_tile, p.batch, tile);
    index = work.exists ? index - int64(p.first_tile[place]) * heads : 0;
    work.sequence = p.order[place];
    work.q = span_of(p.q_side, work.sequence);
    work.k = span_of(p.k_side, work.sequence);
  } else {
    work.q = {0, static_cast<int>(p.q_side.rows)};
    work.k = {0, static_cast<int>(p.k_side.rows)};
    const int64 blocks = ((tiled.rows + kTile - 1) / kTile - kept) * heads;
    work.sequence = static_cast<int>(index / blocks);
    work.exists = work.sequence < p.batch;
    index -= work.sequence * blocks;
  }
}

// The tile and the head at a place in a sequence. kv heads, each with `group` heads of the kind that is counted, come
// in sections of as many as have `section` rows of the other side together, as even as can be.
struct HeadTile {
  int head, tile;
};
DEVICE HeadTile find_head(int64 index, int tiles, int nheads_kv, int group, int rows, int section) {
  const int nheads = nheads_kv * group;
  const int sections = static_cast<int>(clamp(int64(nheads_kv) * rows / section, 0, nheads_kv - 1)) + 1;
  const int section_heads = (nheads_kv + sections - 1) / sections * group;
  const int64 section_tiles = int64(tiles > 0 ? tiles : 1) * section_heads;
  const int place = static_cast<int>(index / section_tiles);
  index -= place * section_tiles;
  const int first_head = place * section_heads;
  const int heads = first_head + section_heads <= nheads ? section_heads : nheads - first_head;
  return {first_head + static_cast<int>(index % heads), static_cast<int>(index / heads)};
}

// Work of a dense batch among the `kept` first tiles of every head of every sequence, the longest first.
template <int kTileQ, int kHeads>
DEVICE Work find_kept(const ForwardParams& p, int64 index, int kept) {
  const int nheads = p.nheads_q / kHeads;
  const int64 heads = int64(p.batch) * nheads;
  const int head = static_cast<int>(index % heads);
  Work work;
  work.exists = index < heads * kept;
  work.sequence = head / nheads;
  work.head = head % nheads * kHeads;
  work.tile = kept - 1 - static_cast<int>(index / heads);
  work.q = {0, static_cast<int>(p.q_side.rows)};
  work.k = {0, static_cast<int>(p.k_side.rows)};
  return work;
}

// A tile is kTileQ rows of each of kHeads neighbouring heads; the work's head is the first of them. kept: tiles of each
// head that come after the others of all heads, the first ones; only in dense batches whose longest tile is the last.
template <bool kRagged, bool kLongestTileLast, int kTileQ, int kHeads = 1>
DEVICE Work find_work(const ForwardParams& p, int64 index, int kept = 0) {
  if constexpr (!kRagged && kLongestTileLast) {
    const int64 heads = int64(p.batch) * (p.nheads_q / kHeads);
    const int64 before = heads * ((p.q_side.rows + kTileQ - 1) / kTileQ - kept);
    if (kept > 0 && index >= before) return find_kept<kTileQ, kHeads>(p, index - before, kept);
  }
  Work work;
  find_sequence<kRagged, kTileQ>(p, p.q_side, p.nheads_q / kHeads, index, work, kept);
  if (!work.exists) return work;
  const int tiles = (work.q.length + kTileQ - 1) / kTileQ;
  const int group = p.nheads_q / p.nheads_kv / kHeads;
  const HeadTile place = find_head(index, tiles - kept, p.nheads_kv, group, work.k.length, p.section_keys);
  work.head = place.head * kHeads;
  work.tile = place.tile;
  work.exists = work.tile < tiles;  // unchecked lengths can make a schedule that does not add up
  if constexpr (kLongestTileLast) work.tile = tiles - 1 - work.tile;
  return work;
}
