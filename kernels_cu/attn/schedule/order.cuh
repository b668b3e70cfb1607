// How schedules number their tiles: which sequence, head and tile come at an index. The schedules of query tiles
// (attn/schedule/queries.cuh) and of key tiles (attn/schedule/keys.cuh) are made of it.
#pragma once

#include "attn/params.cuh"
#include "attn/search.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

// The order of a ragged batch's sequences (attn/schedule/order_sequences.cuh) in global memory, as a launch writes it
// for later ones. One entry has all that a block must know of a sequence.
struct OrderInMemory {
  OrderedSequence* data;

  DEVICE void put(int position, int sequence, const Span& tiled, const Span& other, int first_tile) const {
    data[position] = {tiled.start, other.start, tiled.length, other.length, sequence, first_tile};
  }
  DEVICE void put_total(int batch, int tiles) const { data[batch].first_tile = tiles; }
};

// Reads this order where all lanes of a wave look for the same tile. A value that the compiler is told to be the same
// in all lanes takes none of a lane's registers, of which the backward has none to spare. kAllUniform: it is told so of
// starts, lengths and sequence, else of lengths alone. Which of the two spills less differs between kernels
// (docs/notes/portable-backward.md).
template <bool kAllUniform = true>
struct OrderOfWaves {
  const OrderedSequence* data;

  DEVICE int first_tile(int position) const { return data[position].first_tile; }
  DEVICE int position(int batch, int tile) const {
    return last_by_wave(batch, [&](int n) { return first_tile(n) <= tile; });
  }
  DEVICE OrderedSequence at(const ForwardParams&, int position) const {
    const OrderedSequence& found = data[position];
    return {uniform(found.tiled_start),
            uniform(found.other_start),
            target::wave_uniform(found.tiled_length),
            target::wave_uniform(found.other_length),
            kAllUniform ? target::wave_uniform(found.sequence) : found.sequence,
            found.first_tile};
  }

 private:
  DEVICE static int64 uniform(int64 x) {
    if constexpr (!kAllUniform) return x;
    const auto low = static_cast<unsigned>(target::wave_uniform(static_cast<int>(x)));
    return static_cast<int64>(target::wave_uniform(static_cast<int>(x >> 32))) * (int64(1) << 32) + low;
  }
};

// Finds the sequence that `index` belongs to, and leaves in `index` the index among this sequence's tiles and heads.
// Tiles have kTile rows, of keys where kKeyTiles, else of queries; `heads` are the heads of that side.
//
// Behind the last tile work.exists is false, and the other members are those of some other work. To return early
// instead costs the backward, which uses all registers, a hundred bytes of spills and up to a tenth of its speed.
//
// deferred: tiles of each head of a dense batch that `index` does not count.
//
// Returns whether these are the last tiles of a ragged batch.
template <bool kRagged, bool kKeyTiles, int kTile, class Order, class Tile>
DEVICE bool find_sequence(const ForwardParams& p, const Order& order, int heads, int64& index, Tile& work,
                          int deferred = 0) {
  if constexpr (kRagged) {
    const int tile = static_cast<int>(index / heads), all_tiles = order.first_tile(p.batch);
    work.exists = tile < all_tiles;
    const OrderedSequence found = order.at(p, order.position(p.batch, tile));
    index = work.exists ? index - int64(found.first_tile) * heads : 0;
    work.sequence = found.sequence;
    (kKeyTiles ? work.k : work.q) = {found.tiled_start, found.tiled_length};
    (kKeyTiles ? work.q : work.k) = {found.other_start, found.other_length};
    return found.first_tile + (found.tiled_length + kTile - 1) / kTile >= all_tiles;
  } else {
    work.q = {0, static_cast<int>(p.q_side.rows)};
    work.k = {0, static_cast<int>(p.k_side.rows)};
    const int64 blocks = (((kKeyTiles ? p.k_side : p.q_side).rows + kTile - 1) / kTile - deferred) * heads;
    work.sequence = static_cast<int>(index / blocks);
    work.exists = work.sequence < p.batch;
    index -= work.sequence * blocks;
    return false;
  }
}

struct HeadTile {
  int head, tile;
};
// The number of sections of a sequence's kv heads: of about equal size, with no more than about `section` rows of the
// other side together. rows: of the sequence on the other side.
DEVICE int sections_of(int nheads_kv, int rows, int section) {
  const int64 all = int64(nheads_kv) * rows;
  return all < section ? 1 : static_cast<int>(clamp(all / section, 0, nheads_kv - 1)) + 1;
}
// The head and the tile at an index of a sequence. In a section all heads of a tile come side by side. nheads: of the
// counted side. A block finds its first tile before anything else, and a division takes it 0.1 us.
DEVICE HeadTile find_head(int64 index, int tiles, int nheads, int nheads_kv, int sections) {
  int first_head = 0, heads = nheads;
  if (sections > 1) {
    const int section_heads = (nheads_kv + sections - 1) / sections * (nheads / nheads_kv);
    const int64 section_tiles = int64(tiles > 0 ? tiles : 1) * section_heads;
    const int section_index = static_cast<int>(index / section_tiles);
    index -= section_index * section_tiles;
    first_head = section_index * section_heads;
    heads = first_head + section_heads <= nheads ? section_heads : nheads - first_head;
  }
  const int tile = static_cast<int>(index / heads);
  return {first_head + static_cast<int>(index - int64(tile) * heads), tile};
}
