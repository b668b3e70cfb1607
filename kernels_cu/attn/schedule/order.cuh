// The order of a schedule: which sequence, and which head and tile of it, come at an index. It serves tiles of queries
// and of keys alike.
#pragma once

#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

// The last position in the schedule whose first tile is not beyond `tile`.
DEVICE int position_of(const int* first_tile, int batch, int tile) {
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

// Tiles of kTile rows of one side of a ragged batch. kLoneUncounted: nobody has counted those of a lone sequence, which
// has no order.
template <int kTile, bool kLoneUncounted>
DEVICE int ragged_tiles(const ForwardParams& p, const Side& tiled) {
  if (kLoneUncounted && p.first_tile == nullptr) return (span_of(tiled, 0).length + kTile - 1) / kTile;
  return p.first_tile[p.batch];
}

// Finds the sequence of `index`, of which what is left is the index among the sequence's tiles and heads. Tiles of
// kTile rows are those of one side, `heads` its heads.
//
// Where there is no such sequence, some other one is found: leaving early instead costs the backward, which fills all
// registers, a hundred bytes of spills and up to a tenth of its speed.
//
// kept: tiles of each head of a dense batch that do not come here.
template <bool kRagged, int kTile, bool kLoneUncounted = false, class Tile>
DEVICE void find_sequence(const ForwardParams& p, const Side& tiled, int heads, int64& index, Tile& work,
                          int kept = 0) {
  if constexpr (kRagged) {
    const int tile = static_cast<int>(index / heads);
    work.exists = tile < ragged_tiles<kTile, kLoneUncounted>(p, tiled);
    if (kLoneUncounted && p.first_tile == nullptr) {
      work.sequence = 0;
    } else {
      const int position = position_of(p.first_tile, p.batch, tile);
      index = work.exists ? index - int64(p.first_tile[position]) * heads : 0;
      work.sequence = p.order[position];
    }
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

// The tile and the head at an index of a sequence. kv heads, each with `group` heads of the kind that is counted, come
// in sections of as many as have `section` rows of the other side together, as even as can be.
struct HeadTile {
  int head, tile;
};
DEVICE HeadTile find_head(int64 index, int tiles, int nheads_kv, int group, int rows, int section) {
  const int nheads = nheads_kv * group;
  const int sections = static_cast<int>(clamp(int64(nheads_kv) * rows / section, 0, nheads_kv - 1)) + 1;
  const int section_heads = (nheads_kv + sections - 1) / sections * group;
  const int64 section_tiles = int64(tiles > 0 ? tiles : 1) * section_heads;
  const int section_index = static_cast<int>(index / section_tiles);
  index -= section_index * section_tiles;
  const int first_head = section_index * section_heads;
  const int heads = first_head + section_heads <= nheads ? section_heads : nheads - first_head;
  return {first_head + static_cast<int>(index % heads), static_cast<int>(index / heads)};
}
