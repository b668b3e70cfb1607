// Which query rows and key tiles a piece of work has, in Hopper's forward.
#pragma once

#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "attn/tiles.cuh"
#include "sm90/forward_block.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/rows.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

namespace forward {

DEVICE int rank() { return cluster_rank<kCluster>(); }

// The first query row of this block's tile in each head.
DEVICE int first_query(const WorkTile& work) { return work.tile * kClusterQ + rank() * kTileQ; }

DEVICE TileRow tile_row(int n) { return Rows::at(n); }

// Zeroes the last rows of a query tile, which belong to no query where heads are interleaved. No load ever writes them,
// so they would hold arbitrary bits. Called by several threads, each with its number; they must meet afterwards.
DEVICE void clear_last_rows(unsigned char* queries, int thread, int threads) {
  constexpr int kEach = (kTileRows - kTileQ * kHeadsPerTile) * 128 / 16;  // pieces of 16 bytes in a block of columns
  for (int n = thread; n < kBlocksQk * kEach; n += threads) {
    unsigned char* const block = queries + n / kEach * (kTileRows * 128);
    reinterpret_cast<Chunk<16>*>(block + kTileQ * kHeadsPerTile * 128)[n % kEach] = Chunk<16>{};
  }
  ptx::fence_async_proxy();
}

// The number of a warp's first row, which is row n of the tile; the warp's other rows follow it. It is that of the
// query row in the sequence, since a warp has rows of one head alone. Where heads are interleaved it is n.
DEVICE int first_row_of(const WorkTile& work, int n, const TileRow& own) {
  return kInterleaved ? n : first_query(work) + own.row;
}
// The query row and the head of a warp's n-th row. real: the tile and the sequence have such a row.
struct RowPlace {
  int row, head;
  bool real;
};
DEVICE RowPlace place_of(const WorkTile& work, int head, int first_row, int n) {
  if constexpr (kInterleaved) {
    const TileRow own = tile_row(first_row + n);
    const int row = first_query(work) + own.row;
    return {row, work.head + own.head, own.row < kTileQ && row < work.q.length};
  } else {
    const int row = first_row + n;
    return {row, head, row < work.q.length};
  }
}

DEVICE MapRows map_rows(const WorkTile& work, const Span& span, int bound) {
  return sm90::map_rows<kRagged, kPacked>(work.sequence, span, bound);
}

// The key tiles that any block of the cluster needs. All blocks of the cluster visit all of these.
DEVICE Keys key_tiles_of(const ForwardParams& p, const WorkTile& work) {
  const Visible visible(p, work.sequence, work.q.length, work.k.length);
  return Meeting::keys(p, visible, work.sequence, work.q, work.head, work.tile);
}
// Under a mask of keys, the key tiles up to the last kept key, and in any case the first tile if there is one, since
// the producer loads that before the mask is known.
DEVICE Keys key_tiles_of(const ForwardParams& p, const MaskedTile& work) {
  Visible visible(p, work.sequence, work.q.length, work.k.length);
  visible.len_k = work.behind;
  Keys found = Meeting::keys(p, visible, work.sequence, work.q, work.head, work.tile);
  if (found.end == 0 && key_tiles_of(p, static_cast<const WorkTile&>(work)).end > 0) found.end = 1;
  return found;
}
// The key tiles of this piece of work.
DEVICE TileSpan span_of_item(const Keys& key_tiles, const WorkTile&) { return key_tiles; }
DEVICE TileSpan span_of_item(const Keys&, const WorkItem& work) { return work.keys; }
// Whether there are any key tiles. Without stream-K they begin at 0.
DEVICE bool has_tiles(const TileSpan& span) { return kStreamK ? span.begin < span.end : span.end > 0; }
// Those of an item's key tiles that some row of `own` sees. all: the key tiles of the query tile.
template <class OwnKeys>
DEVICE TileSpan seen_of_item(const OwnKeys& own, const Keys& all, const TileSpan& span) {
  if constexpr (!kStreamK || !(kLeft || kRight)) {
    return own.seen(span);
  } else {
    const TileSpan seen = own.seen(all);
    const int begin = seen.begin < span.begin ? span.begin : seen.begin < span.end ? seen.begin : span.end;
    return {begin, seen.end < begin ? begin : seen.end < span.end ? seen.end : span.end};
  }
}
// Under a mask of keys, leaves out the tiles in front of the first kept key: they are loaded, but not computed.
DEVICE TileSpan kept_of_item(const TileSpan& seen, const WorkTile&) { return seen; }
DEVICE TileSpan kept_of_item(TileSpan seen, const MaskedTile& work) {
  if constexpr (!kLeft) {  // else tiles in front of a window are left out, and numbers of tiles are shifted
    const int first = work.first / kTileK;
    if (seen.begin < first) seen.begin = first < seen.end ? first : seen.end;
  }
  return seen;
}

}  // namespace forward
