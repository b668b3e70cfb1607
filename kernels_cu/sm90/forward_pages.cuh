// Keys and values in pages, in Hopper's forward: how the producer finds and loads key tiles, and how consumers clear
// what lies past a sequence's end. TMA loads a tile in boxes of kPageRows rows, each from one page. (If pages are no
// multiple of eight rows, sm90/forward_page_rows.cuh copies each row instead.)
//
// kPageRows divides both a page and a tile. A box that no query row of the tile may see is not read, since its page may
// no longer belong to the sequence. Its coordinates point past the last page, where TMA delivers zeros. Rows of a page
// past the sequence's end may hold anything. Their keys are masked, and their values become zeros here, as in
// sm90/hidden_values.cuh.
#pragma once

#include "attn/pages.cuh"
#include "sm90/forward_work.cuh"
#include "sm90/hidden_values.cuh"

namespace forward {

// Whether a page of a sequence may be one that no query row sees. With bottom-right alignment the last query row sees
// the last key, so a limit on the right alone hides no page from all rows.
constexpr bool kPagesLimited = kLeft || (kRight && kTopLeft);

// The last query row of this block's tile.
DEVICE int last_query(const WorkTile& work) {
  const int last = first_query(work) + kTileQ - 1;
  return last < work.q.length ? last : work.q.length - 1;
}

// The array of keys or of values, as the producer needs it.
struct KeyArray {
  const ptx::TensorMap* map;
  int page_stride;  // where boxes bring whole rows: from a page to the next on the map's last axis, in heads
  // The rest is for rows that are copied one by one.
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

// Loads the key tiles of a piece of work. kRows: rows of a box; 1: rows are copied one by one
// (sm90/forward_page_rows.cuh); 0: keys are not in pages.
//
// All lanes of a warp call it, each for a box of its own. Together they find the boxes of several tiles at a time: to
// find a page takes issue slots, which consumers need as well, so few lanes should be idle. Pages are found while the
// boxes of earlier tiles are being loaded.
//
// A warp issues boxes one after the other, and consumers that share key tiles would wait for the last ones. So there
// each of kLoadWarps warps brings every kLoadWarps-th box (divided). The first warp announces the bytes of all boxes,
// before or after others have arrived.
template <int kRows>
struct KeyTileLoader {
  static constexpr int kBoxes = kTileK / kRows, kMostDivided = (kBoxes + kLoadWarps - 1) / kLoadWarps;
  static_assert(kTileK % kRows == 0 && kRows % 8 == 0, "a box begins where the swizzle does");
  static_assert(kBoxes <= kProducerLanes, "a lane has one box");
  static_assert(!kPaged || kCluster == 1, "boxes are loaded for one block");

  PageTable<> table;
  VisibleRange<kPagesLimited> range;
  int length, lane, part;  // part: the number of the warp
  int at_once;             // tiles whose boxes are found at a time
  int page_stride;         // what the map's last axis counts for a page: heads where boxes bring whole rows, else 1
  int page, at;            // of the lane's box: the coordinate of its page, and its first row in the page
  int own_tile, box;       // the lane's tile among those found at a time, and its box in the tile
  int tile;                // how many tiles after the one that is loaded next the lane's tile comes
  int ahead = 0;           // further tiles that are found already

  DEVICE KeyTileLoader(const Sm90ForwardParams& p, const WorkTile& work, const KeyArray& array, int part, int lane,
                       bool divided)
      : table(page_table(p.forward.pages, work.sequence, work.k)),
        range(Visible(p.forward, work.sequence, work.q.length, work.k.length), first_query(work), last_query(work)),
        length(work.k.length),
        lane(lane),
        part(part),
        at_once(kProducerLanes / kBoxes),
        page_stride(kWholeRows ? array.page_stride : 1),
        own_tile(lane / kBoxes),
        box(lane % kBoxes) {
    if (kDividesBoxes && divided) {
      at_once = kProducerLanes / kMostDivided;
      own_tile = lane / kMostDivided;
      box = lane % kMostDivided * kLoadWarps + part;
    }
  }

  // Called for each key tile n before it is loaded. Every at_once calls it finds the boxes of tile n and of the next
  // ones before `end`.
  DEVICE void find(const Keys& key_tiles, int n, int end) {
    tile--;
    if (--ahead >= 0) return;
    ahead = at_once - 1;
    tile = own_tile;
    page = static_cast<int>(table.page_count) * page_stride;
    at = 0;
    if (tile >= at_once || n + tile >= end || box >= kBoxes) return;
    const int key = key_tiles.first_key(n + tile) + box * kRows;
    if (!range.overlaps(key, kRows, length)) return;
    const int entry = table.entry(key);
    page = static_cast<int>(table.page(entry)) * page_stride;
    at = key - entry * table.page_rows;
  }

  // Loads the warp's boxes of the key tile of the last find().
  template <int kBlocks>
  DEVICE void load(unsigned char* shared, const KeyArray& array, ptx::Mbarrier* barrier, int, int head) const {
    // All lanes must have seen that the slot is empty before its next round can begin: a lane that looked later would
    // wait for the round after.
    target::wave_sync();
    if (lane == 0 && part == 0) ptx::mbarrier_arrive_expect(barrier, kBlocks * kTileK * 128);
    if (tile != 0 || box >= kBoxes) return;
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

  DEVICE KeyTileLoader(const Sm90ForwardParams& p, const WorkTile& work, const KeyArray&, int, int, bool)
      : rows(map_rows(work, work.k, p.row_bound_k)) {}

  DEVICE static void find(const Keys&, int, int) {}

  template <int kBlocks>
  DEVICE void load(unsigned char* shared, const KeyArray& array, ptx::Mbarrier* barrier, int first_key,
                   int head) const {
    load_rows<kBlocks, kTileK, kCluster>(shared, array.map, barrier, rows, first_key, head);
  }
};

// Zeroes the values of a tile's rows past the sequence's end, for a consumer. kRows: of a box.
template <int kRows>
struct RowsPastEnd {
  int begin;  // the first such row in the tile

  DEVICE void load(int first_key, int length) { begin = length - first_key; }
  // Clears the tile in a slot of the ring, once it is full. Only the box that holds the sequence's end needs it: the
  // boxes after it came as zeros. Each warp clears all rows for its own product and waits for no other warp. (A barrier
  // of one consumer alone would also make compute-sanitizer report a race where consumers meet later: it takes threads
  // that have come to unlike numbers of barriers for unordered.)
  DEVICE void clear(SharedMemory& s, int slot, int lane) const {
    if (begin >= kTileK || begin % kRows == 0) return;
    const int end = begin / kRows * kRows + kRows;
    for (int row = begin + lane; row < end; row += target::kWave) clear_value(s, slot, row);
    ptx::fence_async_proxy();
    target::wave_sync();
  }
};
template <>
struct RowsPastEnd<0> {
  DEVICE void load(int, int) {}
  DEVICE void clear(SharedMemory&, int, int) const {}
};

}  // namespace forward
