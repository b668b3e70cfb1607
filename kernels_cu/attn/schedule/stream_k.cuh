// Which keys of which query tile come at which index of a stream-K schedule, whose last tiles are split by keys.
//
// Where all tiles are equal, whole rounds of the grid take whole tiles. Of those that remain, the key tiles form a
// line, one query tile's behind the other's, which is cut into equal pieces, one for each of those that work. A piece
// begins in one query tile and may end in the next: it is two items of work then, of a range of key tiles each. The
// items of a query tile are merged in the end. (Stream-K, Osama et al. 2023, splits the sums of matrix products
// so.)
#pragma once

#include "attn/params.cuh"
#include "attn/schedule/queries.cuh"
#include "attn/tiles.cuh"
#include "target/target.cuh"

struct WorkItem : WorkTile {
  TileSpan keys;    // key tiles
  bool whole;       // all keys there are; else the item is one of several, and it is told which:
  bool goes_on;     // the piece, in the next query tile
  int split_index;  // of the query tile among those that are split
  int item;         // in the order of keys. Those of one query tile follow each other
};

// The items of a query tile, which is `tiles` key tiles long: [begin, end).
DEVICE TileSpan items_of(const StreamK& stream_k, int split_index, int tiles) {
  // Of two neighbours the second is in the next piece, or in the next query tile, or both: that many further.
  const int first = split_index * tiles, last = first + tiles - 1;
  return {first / stream_k.piece + split_index, last / stream_k.piece + split_index + 1};
}

// Finds what is at an index of the schedule, and of the two items of a piece the first or the `second`. The other
// parameters are those of `find_work_tile`.
template <int kTileQ, int kTileK, int kHeads = 1>
DEVICE void find_work_item(WorkItem& work, const ForwardParams& p, const StreamK& stream_k, int64 index, bool second) {
  const int tiles = static_cast<int>((p.k_side.rows + kTileK - 1) / kTileK);
  const int64 heads = int64(p.batch) * (p.nheads_q / kHeads);
  const int64 whole = heads * ((p.q_side.rows + kTileQ - 1) / kTileQ) - stream_k.tiles;
  work.keys = {0, tiles};
  work.goes_on = false;
  work.whole = true;
  if (stream_k.tiles > 0 && index >= whole) {
    const int piece = static_cast<int>(index - whole);
    const int line = stream_k.tiles * tiles;
    const int from = static_cast<int>(clamp(int64(piece) * stream_k.piece, 0, line));
    const int to = line - from < stream_k.piece ? line : from + stream_k.piece;
    const int split_index = from / tiles + second;
    const int first = split_index * tiles;
    work.keys = {from > first ? from - first : 0, to - first < tiles ? to - first : tiles};
    work.goes_on = to - first > tiles;
    work.whole = from <= first && to - first >= tiles;
    work.item = piece + split_index;
    work.split_index = split_index;
    index = whole + split_index;
  }
  static_cast<WorkTile&>(work) = find_work_tile<false, false, kTileQ, kHeads>(p, index);
}
