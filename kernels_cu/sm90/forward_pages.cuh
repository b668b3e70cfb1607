// Keys and values in pages, in Hopper's forward: a tile comes in boxes of kPageRows rows, each from one page.
//
// kPageRows divides both a page and a tile. A box that no query row of the tile may see is not read, since its page may
// be the sequence's no more: it comes from behind the last page, where all is zeros. Rows of a page past the sequence's
// end may hold anything: of keys they are hidden, of values they become zeros here, as those of hidden_values.cuh.
#pragma once

#include "attn/pages.cuh"
#include "sm90/forward_block.cuh"
#include "sm90/hidden_values.cuh"

namespace forward {

// How the producer loads the key tiles of a work tile. kRows: of a box.
//
// All lanes of its warp come here, each for a box of its own: it finds the page while boxes of the tile before are on
// their way, and asks the copy engine for keys, and later for values, of the same rows.
template <int kRows>
struct KeyTileLoader {
  static constexpr int kBoxes = kTileK / kRows;
  static_assert(kTileK % kRows == 0 && kRows % 8 == 0, "a box begins where the swizzle does");
  static_assert(kBoxes <= kProducerLanes, "a lane has one box");
  static_assert(!kPaged || kCluster == 1, "boxes are loaded for one block");

  // Aligned to the bottom right, the last row of a sequence sees its last key: no page is behind all rows' right edge.
  static constexpr bool kLimited = kLeft || (kRight && kTopLeft);

  // The lane's box of a tile.
  struct Tile {
    int page, at;
  };

  PageTable table;
  Reach<kLimited> reach;
  int length, lane;

  DEVICE KeyTileLoader(const Sm90ForwardParams& p, const WorkTile& work, int lane)
      : table(page_table(p.forward.pages, work.sequence, work.k)),
        reach(Visible(p.forward, work.q.length, work.k.length), first_query(work), last_query(work)),
        length(work.k.length),
        lane(lane) {}

  DEVICE Tile find(int first_key) const {
    const int key = first_key + lane * kRows;
    const int place = table.place(key);
    const bool seen = lane < kBoxes && reach.meets(key, kRows, length);
    return {static_cast<int>(seen ? table.page(place) : table.pages), key - place * table.rows};
  }

  template <int kBlocks>
  DEVICE void load(unsigned char* shared, const ptx::TensorMap* map, ptx::Mbarrier* barrier, const Tile& tile,
                   int head) const {
    if (lane == 0) ptx::mbarrier_arrive_expect(barrier, kBlocks * kTileK * 128);
    if (lane >= kBoxes) return;
    UNROLL for (int b = 0; b < kBlocks; b++) {
      ptx::copy_tensor_5d(shared + (b * kTileK + lane * kRows) * 128, map, barrier, b * kColumns, tile.at, head, 0,
                          tile.page);
    }
  }

 private:
  DEVICE static int last_query(const WorkTile& work) {
    const int last = first_query(work) + kTileQ - 1;
    return last < work.q.length ? last : work.q.length - 1;
  }
};
template <>
struct KeyTileLoader<0> {
  struct Tile {
    int first_key;
  };

  MapRows rows;

  DEVICE KeyTileLoader(const Sm90ForwardParams& p, const WorkTile& work, int)
      : rows(map_rows(work, work.k, p.row_bound_k)) {}

  DEVICE static Tile find(int first_key) { return {first_key}; }

  template <int kBlocks>
  DEVICE void load(unsigned char* shared, const ptx::TensorMap* map, ptx::Mbarrier* barrier, const Tile& tile,
                   int head) const {
    load_rows<kBlocks, kTileK, kCluster>(shared, map, barrier, rows, tile.first_key, head);
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
