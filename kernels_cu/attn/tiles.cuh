// Which tiles of the other side a tile meets, in order.
//
// A KeyTiles says it of a query tile, a QueryTiles of a key tile: tile(n) is the one of number n in [begin, end), and
// edges(n) says what tests its elements need, none where it is full. Here they are intervals, given by the rule of
// visible keys. A list of tiles is another type with the same members, not another kernel.
#pragma once

#include "attn/sequence.cuh"
#include "attn/visible.cuh"
#include "target/target.cuh"

// Numbers of tiles: [begin, end).
struct TileSpan {
  int begin, end;

  DEVICE int count() const { return end - begin; }
};

// The key tiles that query rows [first, last] meet, which are some of kTileQ rows from `first` on: tiles of sink
// tokens, then those of the window.
//
// Where scores grow towards the diagonal, the softmax is to meet the largest first: then its running maximum stays
// where it is. Down from the last key that is seen, or from the diagonal to the first key and then up from it.
enum class TileOrder { kUp, kDown, kFromDiagonal };
template <class Visible, int kTileQ, int kTileK, TileOrder kOrder = TileOrder::kUp>
struct KeyTiles : TileSpan {
  static_assert(kOrder != TileOrder::kFromDiagonal || !(Visible::kLimitedLeft || Visible::kLimitedRight),
                "what some of the rows see has numbers of its own");

  Visible visible;
  int first, last;     // rows
  int sinks, skipped;  // tiles between sink tokens and the window
  int all;             // tiles
  int diagonal;        // the tile where the rows' is, or the nearest to it

  KeyTiles() = default;
  DEVICE KeyTiles(const Visible& visible, int first, int last)
      : TileSpan{0, (visible.row(last).right + kTileK) / kTileK},
        visible(visible),
        first(first),
        last(last),
        sinks(0),
        skipped(0),
        diagonal(0) {
    if constexpr (Visible::kLimitedLeft) {
      int window = visible.row(first).left / kTileK;
      if (window > end) window = end;
      sinks = (visible.sink + kTileK - 1) / kTileK;
      if (sinks > window) sinks = window;
      skipped = window - sinks;
      end -= skipped;
    }
    all = end;
    if constexpr (kOrder == TileOrder::kFromDiagonal) {
      const int key = first + kTileQ / 2 + visible.offset;
      diagonal = key < 0 ? 0 : key / kTileK < all ? key / kTileK : all - 1;
    }
  }

  DEVICE int tile(int n) const {
    if constexpr (kOrder == TileOrder::kDown) n = all - 1 - n;
    if constexpr (kOrder == TileOrder::kFromDiagonal) return n > diagonal ? n : diagonal - n;
    return n < sinks ? n : n + skipped;
  }
  DEVICE int first_key(int n) const { return tile(n) * kTileK; }
  // Of all kTileQ rows, wherever the sequence ends: a constant costs no register.
  DEVICE Edges edges(int n) const {
    return visible.edges(first_key(n), first_key(n) + kTileK - 1, first, first + kTileQ - 1);
  }

  // The same tiles by the same numbers, but for rows [first, last], some of kRows.
  template <int kRows>
  DEVICE KeyTiles<Visible, kRows, kTileK, kOrder> of_rows(int first, int last) const {
    KeyTiles<Visible, kRows, kTileK, kOrder> own(visible, first, last);
    static_cast<TileSpan&>(own) = *this;
    own.sinks = sinks;
    own.skipped = skipped;
    own.all = all;
    own.diagonal = diagonal;
    return own;
  }
  // Those of a span that the rows see: none if last < first. Behind sink tokens also what comes before the window.
  // Where there is a limit, the span must be of all tiles.
  DEVICE TileSpan seen(const TileSpan& span) const {
    if constexpr (!Visible::kLimitedLeft && !Visible::kLimitedRight) {
      return {span.begin, last < first ? span.begin : span.end};
    }
    if (last < first) return {0, 0};
    const KeyTiles own(visible, first, last);
    const int before = own.skipped - skipped;
    const TileSpan seen{visible.sink > 0 ? 0 : before, own.end + before};
    if constexpr (kOrder == TileOrder::kDown) return {all - seen.end, all - seen.begin};
    return seen;
  }
};

// The query tiles that see a key of a tile.
template <class Visible, int kTileQ, int kTileK>
struct QueryTiles : TileSpan {
  Visible visible;
  int key_tile;

  DEVICE QueryTiles(const Visible& visible, int key_tile, int len_q)
      : TileSpan{0, 0}, visible(visible), key_tile(key_tile) {
    const int64 first_key = int64(key_tile) * kTileK;
    const int64 last_key = clamp(first_key + kTileK, 0, visible.len_k) - 1;
    int64 first = 0;
    int64 last = len_q;  // behind it
    if constexpr (Visible::kLimitedRight) first = clamp(first_key - visible.offset - visible.right, 0, len_q);
    if constexpr (Visible::kLimitedLeft) {
      // Sink tokens are seen from every row below.
      if (first_key >= visible.sink) last = clamp(last_key - visible.offset + visible.left + 1, 0, len_q);
    }
    if (first >= last) return;
    begin = static_cast<int>(first / kTileQ);
    end = static_cast<int>((last + kTileQ - 1) / kTileQ);
  }

  // Static, as the object is not needed: the backward has no register to lose, and ptxas spills more of them otherwise.
  DEVICE static int tile(int n) { return n; }
  DEVICE static int first_row(int n) { return tile(n) * kTileQ; }
  DEVICE Edges edges(int n) const {
    const int first_key = key_tile * kTileK;
    return visible.edges(first_key, first_key + kTileK - 1, first_row(n), first_row(n) + kTileQ - 1);
  }
};
