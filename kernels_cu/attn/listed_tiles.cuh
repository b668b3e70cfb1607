// Which tiles meet, read from lists: the counterparts of KeyTiles and QueryTiles (attn/tiles.cuh) for masks that hide
// single keys.
//
// Lists are made for the kernel's own tile sizes (portable/mask_tiles.cu, portable/kept_lists.cuh). A list begins with
// its number of entries; the entries follow in the order of tiles. In the list of a query tile an entry is 2 * key
// tile, plus 1 where elements must be tested by the mask's bits. In the list of a key tile an entry is a pair: the
// number of the query head among those that share the keys, then 2 * query tile, plus 1 as before.
#pragma once

#include "attn/mask_bits.cuh"
#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "attn/tiles.cuh"
#include "attn/visible.cuh"
#include "target/target.cuh"

// Ints between the beginnings of two lists. kEntryInts: ints of an entry.
template <int kEntryInts>
DEVICE int64 list_length(const TileLists& lists) {
  return 1 + int64(lists.capacity) * kEntryInts;
}
// The list of a tile of a sequence; tiles have kTile rows of one side. In a packed batch the lists of sequences follow
// each other: they are at most as many as the array has tiles, and one more for each sequence.
template <int kTile, int kEntryInts>
DEVICE int* list_of(const TileLists& lists, int sequence, const Span& span, int tile, int head) {
  const int64 index = sequence * lists.sequence + span.start / kTile + tile;
  return lists.data + (index * lists.nheads + group_of(head, lists.group)) * list_length<kEntryInts>(lists);
}

// Where the tile of a rank is kept: a head's tiles by the lengths of their lists, the longest first. Indexed as
// list_of().
template <int kTile>
DEVICE int* order_of(const TileLists& lists, int sequence, const Span& span, int rank, int head) {
  const int64 index = sequence * lists.sequence + span.start / kTile + rank;
  return lists.order + index * lists.nheads + group_of(head, lists.group);
}

template <class Visible, int kTileQ, int kTileK>
struct ListedKeyTiles : TileSpan {
  Visible visible;
  MaskBits bits;
  const int* entries;
  int first, last;  // rows

  DEVICE ListedKeyTiles(const BlockMask& mask, const Visible& visible, int sequence, const Span& q, int head, int tile)
      : TileSpan{0, 0}, visible(visible), bits(mask, sequence, head), first(tile * kTileQ) {
    const int behind = q.length - first;
    last = first + (behind < kTileQ ? behind : kTileQ) - 1;
    const int* const list = list_of<kTileQ, 1>(mask.lists, sequence, q, tile, head);
    end = list[0];
    entries = list + 1;
  }

  DEVICE int tile(int n) const { return entries[n] >> 1; }
  DEVICE int first_key(int n) const { return tile(n) * kTileK; }
  DEVICE bool masked(int n) const { return (entries[n] & 1) != 0; }
  DEVICE Edges edges(int n) const {
    return visible.edges(first_key(n), first_key(n) + kTileK - 1, first, first + kTileQ - 1);
  }

  // The same tiles with the same numbers, for a part of the rows: [first, last], of kRows rows from `first` on.
  template <int kRows>
  DEVICE ListedKeyTiles<Visible, kRows, kTileK> of_rows(int first, int last) const {
    return {*this, visible, bits, entries, first, last};
  }
  // The part of a span that the rows may see by the rule of visible keys; empty if last < first.
  DEVICE TileSpan seen(TileSpan span) const {
    if (last < first) return {span.begin, span.begin};
    // Only with this limit, since it waits for an entry that has not been read yet.
    if constexpr (Visible::kLimitedRight) {
      const int right = visible.row(last).right;
      while (span.begin < span.end && first_key(span.end - 1) > right) span.end--;
    }
    if constexpr (Visible::kLimitedLeft) {
      const int left = visible.row(first).left;
      while (visible.sink == 0 && span.begin < span.end && first_key(span.begin) + kTileK <= left) span.begin++;
    }
    return span;
  }

  DEVICE ListedKeyTiles(const TileSpan& span, const Visible& visible, const MaskBits& bits, const int* entries,
                        int first, int last)
      : TileSpan(span), visible(visible), bits(bits), entries(entries), first(first), last(last) {}
};

// The query tiles that a key tile meets, of all query heads that share its keys, head by head.
template <class Visible, int kTileQ, int kTileK>
struct ListedQueryTiles : TileSpan {
  Visible visible;
  const int* entries;
  int key_tile;

  DEVICE ListedQueryTiles(const BlockMask& mask, const Visible& visible, int sequence, const Span& k, int kv_head,
                          int key_tile)
      : TileSpan{0, 0}, visible(visible), key_tile(key_tile) {
    const int* const list = list_of<kTileK, 2>(mask.lists, sequence, k, key_tile, kv_head);
    end = list[0];
    entries = list + 1;
  }

  // Keeps one of `parts` equal parts of the list. `begin` stays 0, which spares the backward a register.
  DEVICE void take_part(int part, int parts) {
    const int first = end * part / parts;
    entries += 2 * first;
    end = end * (part + 1) / parts - first;
  }

  DEVICE int head(int n) const { return entries[2 * n]; }  // in the group
  DEVICE int tile(int n) const { return entries[2 * n + 1] >> 1; }
  DEVICE int first_row(int n) const { return tile(n) * kTileQ; }
  DEVICE bool masked(int n) const { return (entries[2 * n + 1] & 1) != 0; }
  DEVICE Edges edges(int n) const {
    const int first_key = key_tile * kTileK;
    return visible.edges(first_key, first_key + kTileK - 1, first_row(n), first_row(n) + kTileQ - 1);
  }
};

// The types of a kernel's tiles: lists where kListed, else intervals by the rule of visible keys alone. kOrder: of key
// tiles in intervals.
template <bool kListed, class Visible, int kTileQ, int kTileK, TileOrder kOrder = TileOrder::kUp>
struct MeetingTiles {
  using Keys = KeyTiles<Visible, kTileQ, kTileK, kOrder>;
  using Queries = QueryTiles<Visible, kTileQ, kTileK>;

  // The key tiles that a query tile meets.
  DEVICE static Keys keys(const ForwardParams&, const Visible& visible, int, const Span& q, int, int tile) {
    const int first = tile * kTileQ;
    return Keys(visible, first, (q.length - first < kTileQ ? q.length : first + kTileQ) - 1);
  }
  // The query tiles that a key tile meets, in any query head of its kv head.
  DEVICE static Queries queries(const ForwardParams&, const Visible& visible, int, const Span& q, const Span&, int,
                                int tile) {
    return Queries(visible, tile, q.length);
  }
};
template <class Visible, int kTileQ, int kTileK, TileOrder kOrder>
struct MeetingTiles<true, Visible, kTileQ, kTileK, kOrder> {
  using Keys = ListedKeyTiles<Visible, kTileQ, kTileK>;
  using Queries = ListedQueryTiles<Visible, kTileQ, kTileK>;

  DEVICE static Keys keys(const ForwardParams& p, const Visible& visible, int sequence, const Span& q, int head,
                          int tile) {
    return Keys(p.block_mask, visible, sequence, q, head, tile);
  }
  DEVICE static Queries queries(const ForwardParams& p, const Visible& visible, int sequence, const Span&,
                                const Span& k, int kv_head, int tile) {
    return Queries(p.block_mask, visible, sequence, k, kv_head, tile);
  }
};
