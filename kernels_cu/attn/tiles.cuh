// Which tiles of the other side a tile meets, and in which order: those in which one of its rows sees a key.
//
// KeyTiles are the key tiles that a query tile meets, QueryTiles the query tiles that a key tile meets. tile(n) is the
// one of number n, with n in [begin, end). edges(n) says which tests its elements need: none where all are visible.
// Here the tiles are intervals, given by the rule of visible keys (attn/visible.cuh). The types of
// attn/listed_tiles.cuh have the same members but read lists, so a kernel is written once for both.
#pragma once

#include "attn/sequence.cuh"
#include "attn/visible.cuh"
#include "target/target.cuh"

// Numbers of tiles: [begin, end).
struct TileSpan {
  int begin, end;

  DEVICE int count() const { return end - begin; }
};

// In which order a query tile meets its key tiles. kUp: from the first key on. Where scores grow towards the diagonal,
// the softmax should meet the largest first, so that its running max stays where it is. kDown: from the last visible
// key down. kFromDiagonal: from the diagonal down to the first key, then from the diagonal up.
enum class TileOrder { kUp, kDown, kFromDiagonal };
// The key tiles that query rows [first, last] meet: tiles with sink tokens, then those of the window. The rows are some
// of the kTileQ rows from `first` on.
template <class Visible, int kTileQ, int kTileK, TileOrder kOrder = TileOrder::kUp>
struct KeyTiles : TileSpan {
  static_assert(kOrder != TileOrder::kFromDiagonal || !(Visible::kLimitedLeft || Visible::kLimitedRight),
                "what some of the rows see has numbers of its own");

  Visible visible;
  int first, last;                // rows
  int sink_tiles, skipped_tiles;  // tiles with sink tokens, and tiles between those and the window
  int tile_count;                 // number of tiles, however `begin` and `end` are narrowed later
  int diagonal;                   // the tile in which the diagonal crosses the middle of the rows, or the nearest to it

  KeyTiles() = default;
  DEVICE KeyTiles(const Visible& visible, int first, int last)
      : TileSpan{0, (visible.row(last).right + kTileK) / kTileK},
        visible(visible),
        first(first),
        last(last),
        sink_tiles(0),
        skipped_tiles(0),
        diagonal(0) {
    if constexpr (Visible::kLimitedLeft) {
      int window = visible.row(first).left / kTileK;
      if (window > end) window = end;
      sink_tiles = (visible.sink + kTileK - 1) / kTileK;
      if (sink_tiles > window) sink_tiles = window;
      skipped_tiles = window - sink_tiles;
      end -= skipped_tiles;
    }
    tile_count = end;
    if constexpr (kOrder == TileOrder::kFromDiagonal) {
      const int key = first + kTileQ / 2 + visible.offset;
      diagonal = key < 0 ? 0 : key / kTileK < tile_count ? key / kTileK : tile_count - 1;
    }
  }

  DEVICE int tile(int n) const {
    if constexpr (kOrder == TileOrder::kDown) n = tile_count - 1 - n;
    if constexpr (kOrder == TileOrder::kFromDiagonal) return n > diagonal ? n : diagonal - n;
    return n < sink_tiles ? n : n + skipped_tiles;
  }
  DEVICE int first_key(int n) const { return tile(n) * kTileK; }
  // For all kTileQ rows, even past the end of the sequence: a constant number costs no register.
  DEVICE Edges edges(int n) const {
    return visible.edges(first_key(n), first_key(n) + kTileK - 1, first, first + kTileQ - 1);
  }

  // The same tiles with the same numbers, for a part of the rows: [first, last], of kRows rows from `first` on.
  template <int kRows>
  DEVICE KeyTiles<Visible, kRows, kTileK, kOrder> of_rows(int first, int last) const {
    KeyTiles<Visible, kRows, kTileK, kOrder> own(visible, first, last);
    static_cast<TileSpan&>(own) = *this;
    own.sink_tiles = sink_tiles;
    own.skipped_tiles = skipped_tiles;
    own.tile_count = tile_count;
    own.diagonal = diagonal;
    return own;
  }
  // The part of a span that the rows see; empty if last < first. With sink tokens it includes the tiles between these
  // and the window. Where visible keys are limited, the span must be that of all tiles.
  DEVICE TileSpan seen(const TileSpan& span) const {
    if constexpr (!Visible::kLimitedLeft && !Visible::kLimitedRight) {
      return {span.begin, last < first ? span.begin : span.end};
    }
    if (last < first) return {0, 0};
    const KeyTiles own(visible, first, last);
    const int before = own.skipped_tiles - skipped_tiles;
    const TileSpan seen{visible.sink > 0 ? 0 : before, own.end + before};
    if constexpr (kOrder == TileOrder::kDown) return {tile_count - seen.end, tile_count - seen.begin};
    return seen;
  }
};

// The query tiles that see any key of a key tile.
template <class Visible, int kTileQ, int kTileK>
struct QueryTiles : TileSpan {
  Visible visible;
  int key_tile;

  DEVICE QueryTiles(const Visible& visible, int key_tile, int len_q)
      : TileSpan{0, 0}, visible(visible), key_tile(key_tile) {
    const int64 first_key = int64(key_tile) * kTileK;
    const int64 last_key = clamp(first_key + kTileK, 0, visible.len_k) - 1;
    int64 first = 0;
    int64 last = len_q;  // rows [first, last)
    if constexpr (Visible::kLimitedRight) first = clamp(first_key - visible.offset - visible.right, 0, len_q);
    if constexpr (Visible::kLimitedLeft) {
      // All later rows see sink tokens.
      if (first_key >= visible.sink) last = clamp(last_key - visible.offset + visible.left + 1, 0, len_q);
    }
    if (first >= last) return;
    begin = static_cast<int>(first / kTileQ);
    end = static_cast<int>((last + kTileQ - 1) / kTileQ);
  }

  // Static, since they need no object. As other members they make ptxas spill more in the backward, which uses all
  // registers.
  DEVICE static int tile(int n) { return n; }
  DEVICE static int first_row(int n) { return tile(n) * kTileQ; }
  DEVICE Edges edges(int n) const {
    const int first_key = key_tile * kTileK;
    return visible.edges(first_key, first_key + kTileK - 1, first_row(n), first_row(n) + kTileQ - 1);
  }
};
