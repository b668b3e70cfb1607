// The stream-K schedule of Hopper's forward: which keys of which query tile come at an index, where the last query
// tiles are split by keys.
//
// Whole rounds of the grid take whole query tiles. The remaining ones form a line, one behind the other, which is cut
// into equal pieces, one for each worker. A piece begins in one query tile and may end in the next. It then makes two
// items of work, each with a range of key tiles of one query tile. The items of a query tile are merged at the end
// (sm90/forward_merge.cuh). (Stream-K, Osama et al. 2023, splits the sums of matrix products so.)
//
// The item that lies last in a piece comes first. So most workers begin with a first key, and those that go on later
// are all as far behind the others: query tiles of the same head then read the same keys at about the same time, and
// fewer come from DRAM.
//
// In the line all query tiles are equally long, counted in units, whatever number of key tiles they have. An item that
// has a share of the units has this share of the key tiles. So a piece is found by a division even where tiles are
// unlike, and takes no longer than the same units of the longest tile would. There are so many units that pieces are
// whole numbers of them. So no remainder moves the end of a piece past that of a tile, which would make an item of few
// keys that costs a beginning and an end.
//
// A piece that goes on in another query tile takes longer than one that does not: it leaves one item's partial result
// and begins another. So each query tile begins with `begin` units that stand for no keys, and all pieces take about
// equally long. A piece that ends in them does not go on, and one that begins in them begins with the first key. Tiles
// have no such units where pieces are cut in the same way every few tiles: then as many pieces would begin where a tile
// does, and would have less to do.
//
// The last query tile of a head may have rows for some of a block's consumers alone. Then it takes less time, and a
// line may weigh it: last tiles come behind all others of all heads, so that all of them are in the line, and each
// counts `last_share` 64ths of another.
//
// Where the tiles of a dense batch are too unlike for that, as causal ones of few heads are, the line has only the
// longest of them, each as many units long as it has key tiles. The other tiles come whole behind it: see
// UnequalTilesLine.
#pragma once

#include "attn/params.cuh"
#include "attn/schedule/queries.cuh"
#include "attn/tiles.cuh"
#include "target/target.cuh"

struct WorkItem : WorkTile {
  TileSpan keys;  // key tiles of the item; as cut() leaves it, units of the query tile
  bool whole;     // whether the item has all keys of the query tile
  // The unit of the line behind the rest of the piece, which is in the query tile before this one; negative if there is
  // none.
  int rest_end;
  // The number, as of split_index, of the query tile of the piece's item before this one, if that has a part of the
  // tile; else negative.
  int comes_from;
  // The rest is set for query tiles of the line only.
  int split_index;   // number of the query tile among those that are split
  int item;          // number of the item; the items of a query tile follow each other in the order of keys
  int start, units;  // where the keys of the query tile begin in the line, and their length there, in units
  int piece;         // units of a piece

  // Where the query tile ends in the line.
  DEVICE int tile_end() const { return start + units; }
  // Whether the piece goes on in the query tile before this one.
  DEVICE bool goes_on() const { return rest_end >= 0; }

  // Makes this the item that ends in front of unit `end` of the line, in piece number `index`, which begins at unit
  // `begin`. The members split_index, start and units must be set. empty: units in front of the query tile's keys.
  DEVICE void cut(int index, int begin, int end, int empty) {
    item = index + split_index;
    keys = {begin > start ? begin - start : 0, end < tile_end() ? end - start : units};
    rest_end = begin < start - empty ? start - empty : -1;
    whole = keys.begin == 0 && keys.end == units;
  }
};

// A line of alike query tiles. `whole` query tiles come before it in the schedule, each as one item. Then come the
// `tiles` that are split, in pieces of `piece` units. Each has `begin` units and then those of its keys: `units`, or
// `last_units` of each of the `lasts` at the end, which are last tiles of heads. lasts: 0 where last tiles count as
// others and come among them. apart: as of find_work_tile().
struct StreamLine {
  int64 whole;
  int tiles, piece, units, lasts, last_units, begin, apart;

  static constexpr int kShares = 64;

  // The line of a dense batch, which the host has computed.
  template <int kTileQ, int kHeads>
  DEVICE static StreamLine of_dense(const ForwardParams& p, const StreamK& stream_k) {
    const int64 heads = int64(p.batch) * (p.nheads_q / kHeads);
    const int tiles = static_cast<int>((p.q_side.rows + kTileQ - 1) / kTileQ);
    const bool weighs = stream_k.last_share > 0;
    return {heads * tiles - stream_k.tiles,
            stream_k.tiles,
            stream_k.piece,
            stream_k.units,
            weighs ? static_cast<int>(heads) : 0,
            stream_k.units / kShares * stream_k.last_share,
            stream_k.begin,
            weighs ? tiles : 0};
  }
  // The line of a ragged batch is found in two steps. This is the first: if `weighs`, the line that weighs last tiles,
  // provided that query tiles have about equally many keys and that pieces are long enough. Otherwise a line without
  // tiles, which cut() may give some. All lanes of a warp call it. workers: how many blocks, or clusters, take work at
  // the same time. key_tiles_at_end(longest): key tiles of find_end(). The host computes the same for dense batches
  // (rawattn/_kernels/sm90/stream_k.py).
  template <int kTileQ, int kHeads, class Order, class KeyTilesAtEnd>
  DEVICE static StreamLine of_ragged(const ForwardParams& p, const Order& order, const StreamK& stream_k, bool weighs,
                                     unsigned workers, int lane, const KeyTilesAtEnd& key_tiles_at_end) {
    const int64 heads = p.nheads_q / kHeads, all = order.first_tile(p.batch) * heads;
    if (weighs) {
      // A lane finds each of the two, since that takes long.
      const auto own = static_cast<unsigned>(key_tiles_at_end(lane == 0));
      const unsigned most = target::shuffle(own, 0), fewest = target::shuffle(own, 1);
      const int64 lasts = p.batch * heads;
      const int longs = static_cast<int>((all - lasts) % workers);
      const int64 length =
          (int64(longs) * kShares + lasts * stream_k.last_share) * most + (longs + lasts) * stream_k.begin;
      const int64 piece = (length + workers - 1) / workers;
      const bool alike = fewest * int64(4) >= most * int64(3);
      if (alike && piece >= int64(stream_k.least_piece) * kShares && length < int64(1) << 31)
        return {all - lasts - longs,     static_cast<int>(longs + lasts),
                static_cast<int>(piece), static_cast<int>(kShares * most),
                static_cast<int>(lasts), static_cast<int>(stream_k.last_share * most),
                stream_k.begin,          (order.at(p, 0).tiled_length + kTileQ - 1) / kTileQ};
    }
    return {all, 0, 1, 1, 0, 1, 0, 0};
  }
  // How many tiles of a line without tiles remain after whole rounds of the grid.
  DEVICE unsigned left(unsigned workers) const {
    return static_cast<unsigned>(whole < workers ? whole : whole % workers);
  }
  // Splits the last tiles of a line that has none, `last` of them, if pieces are enough shorter than the first of these
  // tiles, which has `keys` key tiles.
  DEVICE void cut(const StreamK& stream_k, unsigned workers, unsigned last, unsigned keys) {
    const bool enough = int64(last) * keys >= int64(workers) * stream_k.least_piece;
    const unsigned some = enough ? workers : last * keys / stream_k.least_piece;
    // A piece that ends in the next tile has to begin once more there. So tiles are cut into the same number of pieces
    // each, if pieces are hardly longer then.
    const unsigned even = some / last * last;
    const bool hardly = even > 0 && quotient_up(keys * last, even) <= quotient_up(keys * last, some) + kHardlyLonger;
    const unsigned pieces = hardly ? even : some;
    if (pieces <= last || (pieces - last) * keys < stream_k.least_gain * pieces) return;
    const unsigned part = quotient_up(keys, pieces);
    whole -= last;
    tiles = static_cast<int>(last);
    units = last_units = static_cast<int>(pieces * part);
    begin = repeats(last, pieces) ? 0 : static_cast<int>(int64(units) * stream_k.begin / (int64(keys) * kShares));
    piece = static_cast<int>(last * part + (begin > 0 ? quotient_up(last * begin, pieces) : 0));
  }

  static constexpr unsigned kHardlyLonger = 2;  // by how many key tiles at most
  static constexpr unsigned kFewTiles = 4;
  // Whether pieces begin where a tile does every few tiles, or more often: whether `tiles` divides so many times
  // `pieces`.
  DEVICE static bool repeats(unsigned tiles, unsigned pieces) {
    const unsigned rest = pieces % tiles;
    UNROLL for (unsigned n = 1; n <= kFewTiles; n++) {
      UNROLL for (unsigned times = 0; times < n; times++) {
        if (n * rest == times * tiles) return true;
      }
    }
    return false;
  }
  DEVICE static unsigned quotient_up(unsigned x, unsigned y) { return (x + y - 1) / y; }

  // Finds the item at an index. rest_end: that of the item before it in its piece, or negative for a piece's first
  // item. Returns the index of the item's query tile in the schedule. If the query tile is split, `keys` are the item's
  // units in it.
  DEVICE int64 find(WorkItem& work, int64 index, int rest_end) const {
    work.rest_end = -1;
    work.whole = true;
    if (tiles == 0 || index < whole) return index;
    const int longs = (tiles - lasts) * (begin + units), length = longs + lasts * (begin + last_units);
    const int first = static_cast<int>(clamp((index - whole) * piece, 0, length));
    if (first == length) return whole + tiles;
    const int piece_end = length - first < piece ? length : first + piece;
    const int end = rest_end < 0 ? piece_end : rest_end;
    const int key = end - 1 - begin;  // a piece that ends in a tile's first units has none of its keys
    const bool last = lasts > 0 && key >= longs;
    const int before = last ? longs : 0;
    work.units = last ? last_units : units;
    work.split_index = (key - before) / (begin + work.units);
    work.start = before + work.split_index * (begin + work.units) + begin;
    if (last) work.split_index += tiles - lasts;
    work.piece = piece;
    work.cut(static_cast<int>(index - whole), first, end, begin);
    return whole + work.split_index;
  }
};

// The schedule of a dense batch whose query tiles are unlike. A "row" has the query tiles of one number in all heads of
// all sequences, which are equally long. The line has the rows whose tiles are longer than a worker's fair share, cut
// into pieces of this share. The tiles of all other rows come whole behind the pieces, and go to whichever worker is
// free.
template <int kTileQ, int kHeads>
struct UnequalTilesLine {
  const ForwardParams& p;
  const StreamK& stream_k;

  // Finds the item at an index; arguments as of StreamLine::find(). units_of(work): units of the query tile number
  // work.tile, at least one.
  template <class UnitsOf>
  DEVICE void find(WorkItem& work, int64 index, int rest_end, const UnitsOf& units_of) const {
    const int nheads = p.nheads_q / kHeads, each = p.batch * nheads;
    const int last = static_cast<int>((p.q_side.rows + kTileQ - 1) / kTileQ) - 1;
    int row, head;
    work.rest_end = -1;
    work.whole = true;
    work.exists = true;
    work.q = {0, static_cast<int>(p.q_side.rows)};
    work.k = {0, static_cast<int>(p.k_side.rows)};
    if (index >= stream_k.pieces) {
      const int64 tile = index - stream_k.pieces;
      row = stream_k.rows + static_cast<int>(tile / each);
      head = static_cast<int>(tile % each);
      work.exists = row <= last;
      work.tile = last - row;
    } else {
      const int first = static_cast<int>(index) * stream_k.piece;
      int end = rest_end < 0 ? first + stream_k.piece : rest_end;
      work.start = 0;
      for (row = 0;; row++) {
        work.tile = last - row;
        work.units = units_of(work);
        if (row + 1 == stream_k.rows || end <= work.start + each * work.units) break;
        work.start += each * work.units;
      }
      const int row_end = work.start + each * work.units;
      if (row_end < end) end = row_end;
      head = (end - 1 - work.start) / work.units;
      work.start += head * work.units;
      work.split_index = row * each + head;
      work.piece = stream_k.piece;
      work.cut(static_cast<int>(index), first, end, 0);
    }
    work.sequence = head / nheads;
    work.head = head % nheads * kHeads;
  }
};

// The key tiles that the units [from, to) of a query tile stand for. all: its key tiles; units: of all of them. However
// the quotient is rounded, an item begins where the one before it ends.
DEVICE TileSpan part_of(const TileSpan& all, int from, int to, int units) {
  const int count = all.count();
  const float tiles = static_cast<float>(count) * target::reciprocal(static_cast<float>(units));
  const auto behind = [&](int unit) {
    const int tile = count == units ? unit : static_cast<int>(static_cast<float>(unit) * tiles);
    return unit < units && tile < count ? tile : count;
  };
  return {all.begin + behind(from), all.begin + behind(to)};
}

// The numbers of all items of an item's query tile: [begin, end).
DEVICE TileSpan items_of(const WorkItem& work) {
  // The number of an item is that of its piece plus split_index. From one item to the next it grows by 1 where the
  // piece or the query tile changes, and by 2 where both do.
  return {work.start / work.piece + work.split_index, (work.tile_end() - 1) / work.piece + work.split_index + 1};
}
