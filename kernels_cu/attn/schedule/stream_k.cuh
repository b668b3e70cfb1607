// Which keys of which query tile come at which index of a stream-K schedule, whose last tiles are split by keys.
//
// Whole rounds of the grid take whole tiles. Those that remain form a line, one query tile behind the other, which is
// cut into equal pieces, one for each of those that work. A piece begins in one query tile and may end in the next: it
// is two items of work then, of a range of key tiles each. The items of a query tile are merged in the end. (Stream-K,
// Osama et al. 2023, splits the sums of matrix products so.)
//
// In the line every query tile is as many units long, whatever it has of keys: an item that has some of the units has
// that part of the key tiles. So a piece is found by a division where tiles are unlike, and takes at most as long as
// its units would of the longest tile. Units are so many that pieces are whole numbers of them: no remainder moves the
// pieces' ends past those of tiles, where an item of few keys would cost its beginning and ending.
//
// Where the tiles of a dense batch are too unlike for that, as causal ones of few heads are, a line has the longest of
// them, each as long as it has key tiles, and whole tiles come behind it: see UnlikeLine.
#pragma once

#include "attn/params.cuh"
#include "attn/schedule/queries.cuh"
#include "attn/tiles.cuh"
#include "target/target.cuh"

struct WorkItem : WorkTile {
  TileSpan keys;     // key tiles
  bool whole;        // all keys there are; else the item is one of several, and it is told which:
  bool goes_on;      // the piece, in the next query tile
  int split_index;   // of the query tile among those that are split
  int item;          // in the order of keys. Those of one query tile follow each other
  int start, units;  // where the query tile begins in the line, and how long it is there
  int piece;         // units of a piece

  DEVICE int behind() const { return start + units; }

  // The item from unit `begin` of the line on, in piece number `index`, which ends in front of `end`. The query tile is
  // told. Which of its units the item has, `keys` says.
  DEVICE void cut(int index, int begin, int end) {
    item = index + split_index;
    keys = {begin > start ? begin - start : 0, end < behind() ? end - start : units};
    goes_on = end > behind();
    whole = keys.begin == 0 && keys.end == units;
  }
};

// The query tiles that are split, behind `whole` others.
struct StreamLine {
  int64 whole;
  int tiles, piece, units;

  // Of a dense batch the host knows them.
  template <int kTileQ, int kHeads>
  DEVICE static StreamLine of_dense(const ForwardParams& p, const StreamK& stream_k) {
    const int64 heads = int64(p.batch) * (p.nheads_q / kHeads);
    const int64 all = heads * ((p.q_side.rows + kTileQ - 1) / kTileQ);
    return {all - stream_k.tiles, stream_k.tiles, stream_k.piece, stream_k.units};
  }
  // Of a ragged batch: what remains behind whole rounds of the grid, if a piece of it is enough shorter than its first
  // tile. key_tiles(n): of the query tile at index n. No tiles where `index` is in front of them. The same sums as the
  // host's for dense batches (rawattn/_kernels/sm90/forward_steps.py).
  template <int kTileQ, int kHeads, class Order, class KeyTiles>
  DEVICE static StreamLine of_ragged(const ForwardParams& p, const Order& order, const StreamK& stream_k,
                                     unsigned workers, int64 index, const KeyTiles& key_tiles) {
    const unsigned tiles = order.first_tile(p.batch), heads = p.nheads_q / kHeads;
    const int64 all = int64(tiles) * heads;
    const unsigned last = tiles % workers * heads % workers;
    if (index >= all - last && last > 0) {
      const unsigned keys = key_tiles(all - last);
      const unsigned most = last * keys / stream_k.least_piece, some = most < workers ? most : workers;
      // A piece that ends in the next tile begins once more there: as many of each tile, if they are hardly longer.
      const unsigned even = some / last * last;
      const bool hardly = even > 0 && quotient_up(keys * last, even) <= quotient_up(keys * last, some) + kHardlyLonger;
      const unsigned pieces = hardly ? even : some;
      if (pieces > last && (pieces - last) * keys >= stream_k.least_gain * pieces) {
        const unsigned part = quotient_up(keys, pieces);
        return {all - last, static_cast<int>(last), static_cast<int>(last * part), static_cast<int>(pieces * part)};
      }
    }
    return {all, 0, 1, 1};
  }

  static constexpr unsigned kHardlyLonger = 2;  // key tiles
  DEVICE static unsigned quotient_up(unsigned x, unsigned y) { return (x + y - 1) / y; }

  // Finds what is at an index, where a piece goes on from unit `at` of the line, or begins if that is negative: which
  // units, as its `keys`, of the query tile at the index that is returned.
  DEVICE int64 find(WorkItem& work, int64 index, int at) const {
    work.goes_on = false;
    work.whole = true;
    if (tiles == 0 || index < whole) return index;
    const int length = tiles * units;
    const int first = static_cast<int>(clamp((index - whole) * piece, 0, length));
    const int begin = at < 0 ? first : at;
    work.split_index = begin / units;
    work.start = work.split_index * units;
    work.units = units;
    work.piece = piece;
    work.cut(static_cast<int>(index - whole), begin, length - first < piece ? length : first + piece);
    return whole + work.split_index;
  }
};

// A dense batch by the length of its query tiles: a row of it are those of one number in all heads of all sequences,
// which are equally long. A line has the longest rows, whose tiles are longer than what is fair, in pieces of that; the
// others' tiles come whole, behind all pieces, and go to whoever is done.
template <int kTileQ, int kHeads>
struct UnlikeLine {
  const ForwardParams& p;
  const StreamK& stream_k;

  // Finds what is at an index, as StreamLine does. units_of(tile): of a query tile of that number, one or more.
  template <class UnitsOf>
  DEVICE void find(WorkItem& work, int64 index, int at, const UnitsOf& units_of) const {
    const int nheads = p.nheads_q / kHeads, each = p.batch * nheads;
    const int last = static_cast<int>((p.q_side.rows + kTileQ - 1) / kTileQ) - 1;
    int row, head;
    work.goes_on = false;
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
      const int begin = at < 0 ? first : at;
      work.start = 0;
      for (row = 0;; row++) {
        work.tile = last - row;
        work.units = units_of(work);
        if (row + 1 == stream_k.rows || begin < work.start + each * work.units) break;
        work.start += each * work.units;
      }
      head = (begin - work.start) / work.units;
      const int end = work.start + each * work.units;
      work.start += head * work.units;
      work.split_index = row * each + head;
      work.piece = stream_k.piece;
      const bool last_piece = row + 1 == stream_k.rows && first + stream_k.piece > end;
      work.cut(static_cast<int>(index), begin, last_piece ? end : first + stream_k.piece);
    }
    work.sequence = head / nheads;
    work.head = head % nheads * kHeads;
  }
};

// Of a query tile's key tiles those of some of its units. Where one item ends the next one begins, however the
// quotient is rounded.
DEVICE TileSpan part_of(const TileSpan& all, int from, int to, int units) {
  const int count = all.count();
  const float tiles = static_cast<float>(count) * target::reciprocal(static_cast<float>(units));
  const auto behind = [&](int unit) {
    const int tile = count == units ? unit : static_cast<int>(static_cast<float>(unit) * tiles);
    return unit < units && tile < count ? tile : count;
  };
  return {all.begin + behind(from), all.begin + behind(to)};
}

// The items of an item's query tile: [begin, end).
DEVICE TileSpan items_of(const WorkItem& work) {
  // Of two neighbours the second is in the next piece, or in the next query tile, or both: that many further.
  return {work.start / work.piece + work.split_index, (work.behind() - 1) / work.piece + work.split_index + 1};
}
