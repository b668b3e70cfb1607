// Keys and values in pages that no boxes of eight rows divide, in Hopper's forward: a producer's lanes find each row of
// a tile, and copy it.
//
// A warp has the rows of a tile, or those of one of kRowWarps parts. A lane finds a row, whose page's id travels while
// the warp waits for a slot of the ring. It copies 16 bytes of each block of columns of every fourth row: of a row,
// eight lanes copy what lies together. What nobody may see comes as zeros: rows past the sequence's end, and those that
// no query row of the tile sees, whose pages may be the sequence's no more.
#pragma once

#include "sm90/forward_pages.cuh"

namespace forward {

template <>
struct KeyTileLoader<1> {
  static constexpr int kRows = kTileK / kRowWarps;
  static constexpr int kFinds = round_up(kRows, target::kWave) / target::kWave;  // rows that a lane finds
  static constexpr int kLanesOfRow = 128 / 16;
  static constexpr int kAtOnce = target::kWave / kLanesOfRow;  // rows that a warp copies
  static constexpr int kTimes = target::kWave / kAtOnce;       // until those of a find are copied
  static_assert(kRows % kAtOnce == 0, "no lane is idle");

  PageTable<> table;
  Reach<kPagesLimited> reach;
  int length, lane;
  int first;  // of the warp's rows in a tile
  int key;    // that the lane has found first
  PageTable<>::Id ids[kFinds];

  DEVICE KeyTileLoader(const Sm90ForwardParams& p, const WorkTile& work, const KeyArray&, int part, int lane)
      : table(page_table(p.forward.pages, work.sequence, work.k)),
        reach(Visible(p.forward, work.q.length, work.k.length), first_query(work), last_query(work)),
        length(work.k.length),
        lane(lane),
        first(part * kRows) {}

  // The rows of key tile n, which is loaded next.
  DEVICE void find(const Keys& key_tiles, int n, int) {
    key = key_tiles.first_key(n) + first + lane;
    UNROLL for (int i = 0; i < kFinds; i++) ids[i] = table.id(table.entry(key + i * target::kWave));
  }

  // Every lane arrives at the barrier once its own copies have landed.
  template <int kBlocks>
  DEVICE void load(unsigned char* shared, const KeyArray& array, ptx::Mbarrier* barrier, int, int head) const {
    UNROLL for (int i = 0; i < kFinds; i++) {
      const int rows = kRows - i * target::kWave;  // and no more than lanes
      const unsigned found = find_row(array.strides, i);
      // With no row to leave out, a copy of a whole block is one instruction.
      if (target::wave_any(found == kNowhere && lane < rows)) {
        copy<kBlocks, false>(shared, array, found, i, head);
      } else {
        copy<kBlocks, true>(shared, array, found, i, head);
      }
    }
    ptx::mbarrier_arrive_behind_copies(barrier);
  }

 private:
  static constexpr unsigned kNowhere = ~0u;

  // Where a row that the lane has found begins, in 16 bytes behind the first one of the array.
  DEVICE unsigned find_row(const Strides& strides, int i) const {
    const int own = key + i * target::kWave;
    if (!reach.meets(own, 1, length)) return kNowhere;
    const int64 page = table.page_of(ids[i]), in_page = own - table.entry(own) * table.rows;
    return static_cast<unsigned>((page * strides.batch + in_page * strides.row) * int(sizeof(StoredKey)) / 16);
  }
  // The rows of find i. kAll: none of them is nowhere.
  template <int kBlocks, bool kAll>
  DEVICE void copy(unsigned char* shared, const KeyArray& array, unsigned found, int i, int head) const {
    const int row = lane / kLanesOfRow, chunk = lane % kLanesOfRow;
    const unsigned char* const of_head =
        static_cast<const unsigned char*>(array.data) + head * array.strides.head * int(sizeof(StoredKey)) + chunk * 16;
    // In the swizzle, every other four rows begin at the other half of what eight of them share.
    const unsigned to = target::shared_address(shared) + (first + i * target::kWave + row) * 128;
    const unsigned into[2] = {to + (chunk ^ row) * 16, to + (chunk ^ row ^ 4) * 16};
    const int times = kRows / kAtOnce - i * kTimes;  // and no more than kTimes
#pragma unroll(4)
    for (int n = 0; n < (times < kTimes ? times : kTimes); n++) {
      const unsigned from = target::shuffle(found, n * kAtOnce + row);
      const bool exists = kAll || from != kNowhere;
      const unsigned char* const own = of_head + (exists ? from : 0) * 16ull;
      UNROLL for (int b = 0; b < kBlocks; b++) {
        const unsigned at = into[n % 2] + n * kAtOnce * 128 + b * kTileK * 128;
        const int rest = array.row_bytes - b * 128 - chunk * 16;
        if (array.row_bytes % 16 == 0) {
          target::copy_async<16>(at, own + b * 128, exists && rest > 0);
        } else {
          ptx::copy_async_partly(at, own + b * 128, !exists || rest < 0 ? 0 : rest < 16 ? rest : 16);
        }
      }
    }
  }
};

}  // namespace forward
