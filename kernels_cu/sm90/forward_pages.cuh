// Keys and values in pages, in Hopper's forward: a tile comes in boxes of kPageRows rows, each from one page. (Of pages
// that boxes of eight rows do not divide, sm90/forward_page_rows.cuh copies each row.)
//
// kPageRows divides both a page and a tile. A box that no query row of the tile may see is not read, since its page may
// be the sequence's no more: it comes from behind the last page, where all is zeros. Rows of a page past the sequence's
// end may hold anything: of keys they are hidden, of values they become zeros here, as those of hidden_values.cuh.
#pragma once

#include "attn/pages.cuh"
#include "sm90/forward_block.cuh"
#include "sm90/hidden_values.cuh"

namespace forward {

// Aligned to the bottom right, the last row of a sequence sees its last key: no page is behind all rows' right edge.
constexpr bool kPagesLimited = kLeft || (kRight && kTopLeft);

// The last query row of this block's tile.
DEVICE int last_query(const WorkTile& work) {
  const int last = first_query(work) + kTileQ - 1;
  return last < work.q.length ? last : work.q.length - 1;
}

// Keys or values as a producer finds them.
struct KeyArray {
  const ptx::TensorMap* map;
  int next_page;  // heads from a page to the next, where boxes bring whole rows
  // Where rows are copied one by one.
  const void* data;
  const Strides& strides;
  int row_bytes;  // of a head
};
template <class Maps>
DEVICE KeyArray array_of_keys(const Sm90ForwardParams& p, const Maps& maps) {
  return {maps.of_keys(), p.next_page_k, p.forward.k, p.forward.k_strides, kHeadDim * int(sizeof(StoredKey))};
}
template <class Maps>
DEVICE KeyArray array_of_values(const Sm90ForwardParams& p, const Maps& maps) {
  return {maps.of_values(), p.next_page_v, p.forward.v, p.forward.v_strides, kHeadDimV * int(sizeof(StoredKey))};
}

// How the producer loads the key tiles of a work tile. kRows: of a box.
//
// All lanes of its warp come here, each for a box of its own, of as many tiles at a time as there are lanes for: to
// find a page takes instructions, which consumers want as well, so no lane may be idle. It is found while boxes of the
// tiles before are on their way.
template <int kRows>
struct KeyTileLoader {
  static constexpr int kBoxes = kTileK / kRows;
  static constexpr int kAtOnce = kProducerLanes / kBoxes;
  static_assert(kTileK % kRows == 0 && kRows % 8 == 0, "a box begins where the swizzle does");
  static_assert(kBoxes <= kProducerLanes, "a lane has one box");
  static_assert(!kPaged || kCluster == 1, "boxes are loaded for one block");

  PageTable<> table;
  Reach<kPagesLimited> reach;
  int length, lane;
  int next_page;  // heads from a page to the next, where boxes bring whole rows; else pages are counted
  int page, at;   // of the lane's box
  int tile, box;  // in this tile, counted from the first one that was found with it
  int ahead = 0;  // tiles that are found

  DEVICE KeyTileLoader(const Sm90ForwardParams& p, const WorkTile& work, const KeyArray& array, int, int lane)
      : table(page_table(p.forward.pages, work.sequence, work.k)),
        reach(Visible(p.forward, work.q.length, work.k.length), first_query(work), last_query(work)),
        length(work.k.length),
        lane(lane),
        next_page(kWholeRows ? array.next_page : 1),
        box(lane % kBoxes) {}

  // Of key tile n, which is loaded next, and of some behind it in front of `end`.
  DEVICE void find(const Keys& key_tiles, int n, int end) {
    tile--;
    if (--ahead >= 0) return;
    ahead = kAtOnce - 1;
    tile = lane / kBoxes;
    page = static_cast<int>(table.pages) * next_page;
    at = 0;
    if (tile >= kAtOnce || n + tile >= end) return;
    const int key = key_tiles.first_key(n + tile) + box * kRows;
    if (!reach.meets(key, kRows, length)) return;
    const int entry = table.entry(key);
    page = static_cast<int>(table.page(entry)) * next_page;
    at = key - entry * table.rows;
  }

  // The tile that was found last.
  template <int kBlocks>
  DEVICE void load(unsigned char* shared, const KeyArray& array, ptx::Mbarrier* barrier, int, int head) const {
    // All lanes have seen that the slot is empty before its next round may begin: one that looked later would wait for
    // the round after.
    target::wave_sync();
    if (lane == 0) ptx::mbarrier_arrive_expect(barrier, kBlocks * kTileK * 128);
    if (tile != 0) return;
    if constexpr (kWholeRows) {
      ptx::copy_tensor_5d(shared + box * kRows / 8 * kBlocks * 1024, array.map, barrier, 0, 0, 0, at / 8, page + head);
      return;
    }
    UNROLL for (int b = 0; b < kBlocks; b++) {
      ptx::copy_tensor_5d(shared + (b * kTileK + box * kRows) * 128, array.map, barrier, b * kStoredColumns, at, head,
                          0, page);
    }
  }
};
template <>
struct KeyTileLoader<0> {
  MapRows rows;

  DEVICE KeyTileLoader(const Sm90ForwardParams& p, const WorkTile& work, const KeyArray&, int, int)
      : rows(map_rows(work, work.k, p.row_bound_k)) {}

  DEVICE static void find(const Keys&, int, int) {}

  template <int kBlocks>
  DEVICE void load(unsigned char* shared, const KeyArray& array, ptx::Mbarrier* barrier, int first_key,
                   int head) const {
    load_rows<kBlocks, kTileK, kCluster>(shared, array.map, barrier, rows, first_key, head);
  }
};

// The values of a tile's rows past the sequence's end, for a consumer.
template <int kRows>
struct RowsPastEnd {
  int begin;  // in the tile

  DEVICE void load(int first_key, int length) { begin = length - first_key; }
  // Of the tile in the ring's slot, once it is full. Behind the box that the end is in, all is zeros already.
  DEVICE void clear(SharedMemory& s, int slot, int consumer) const {
    if (begin >= kTileK || begin % kRows == 0) return;
    const int end = begin / kRows * kRows + kRows;
    for (int row = begin + target::thread_index() % kWarpgroup; row < end; row += kWarpgroup) clear_value(s, slot, row);
    values_are_clean(consumer);
  }
};
template <>
struct RowsPastEnd<0> {
  DEVICE void load(int, int) {}
  DEVICE void clear(SharedMemory&, int, int) const {}
};

}  // namespace forward
