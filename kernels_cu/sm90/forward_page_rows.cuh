// Keys and values in pages whose size is no multiple of eight rows, in Hopper's forward: lanes of the producer find
// each row of a key tile and copy it asynchronously (cp.async).
//
// A warp has all rows of a tile, or one of kLoadWarps equal parts. Each lane finds some rows: it loads the ids of their
// pages, and those are in flight while the warp waits for a slot of the ring. For the copies eight lanes take a row,
// each 16 bytes of every block of columns, so a warp copies four rows at a time. Rows past the sequence's end, and rows
// that no query row of the tile may see, become zeros without being read: the pages of the latter may no longer belong
// to the sequence.
#pragma once

#include "sm90/forward_pages.cuh"

namespace forward {

template <>
struct KeyTileLoader<1> {
  static constexpr int kRows = kTileK / kLoadWarps;
  static constexpr int kFinds = round_up(kRows, target::kWave) / target::kWave;  // rows that a lane finds
  static constexpr int kLanesOfRow = 128 / 16;
  static constexpr int kAtOnce = target::kWave / kLanesOfRow;  // rows that a warp copies at a time
  static constexpr int kTimes = target::kWave / kAtOnce;       // such steps for the rows of one find, one in each lane
  static_assert(kRows % kAtOnce == 0, "no lane is idle");

  PageTable<> table;
  VisibleRange<kPagesLimited> range;
  int length, lane;
  int first;  // the warp's first row in a tile
  int key;    // of the lane's first row; its others follow at a distance of 32
  PageTable<>::Id ids[kFinds];

  DEVICE KeyTileLoader(const Sm90ForwardParams& p, const WorkTile& work, const KeyArray&, int part, int lane, bool)
      : table(page_table(p.forward.pages, work.sequence, work.k)),
        range(Visible(p.forward, work.sequence, work.q.length, work.k.length), first_query(work), last_query(work)),
        length(work.k.length),
        lane(lane),
        first(part * kRows) {}

  // Looks up the pages of the rows of key tile n, which is loaded next.
  DEVICE void find(const Keys& key_tiles, int n, int) {
    key = key_tiles.first_key(n) + first + lane;
    UNROLL for (int i = 0; i < kFinds; i++) ids[i] = table.id(table.entry(key + i * target::kWave));
  }

  // Every lane arrives at the barrier once its own copies have landed.
  template <int kBlocks>
  DEVICE void load(unsigned char* shared, const KeyArray& array, ptx::Mbarrier* barrier, int, int head) const {
    UNROLL for (int i = 0; i < kFinds; i++) {
      const int rows = kRows - i * target::kWave;  // lanes that have a row, if fewer than all
      const unsigned found = find_row(array.strides, i);
      // If no row is left out, a copy of 16 bytes in a whole block of columns is one instruction.
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

  // Where the lane's row of find i begins, in units of 16 bytes from the start of the array. kNowhere if it is not
  // read.
  DEVICE unsigned find_row(const Strides& strides, int i) const {
    const int own = key + i * target::kWave;
    if (!range.overlaps(own, 1, length)) return kNowhere;
    const int64 page = table.page_of(ids[i]), in_page = own - table.entry(own) * table.page_rows;
    return static_cast<unsigned>((page * strides.batch + in_page * strides.row) * int(sizeof(StoredKey)) / 16);
  }
  // Copies the rows of find i. kAll: none of them is kNowhere.
  template <int kBlocks, bool kAll>
  DEVICE void copy(unsigned char* shared, const KeyArray& array, unsigned found, int i, int head) const {
    const int row = lane / kLanesOfRow, chunk = lane % kLanesOfRow;
    const unsigned char* const of_head =
        static_cast<const unsigned char*>(array.data) + head * array.strides.head * int(sizeof(StoredKey)) + chunk * 16;
    // In the 128-byte swizzle, chunk c of row r lies at chunk c ^ r % 8. A warp copies four rows at a time, so r % 8 is
    // `row` and `row ^ 4` in turn.
    const unsigned to = target::shared_address(shared) + (first + i * target::kWave + row) * 128;
    const unsigned into[2] = {to + (chunk ^ row) * 16, to + (chunk ^ row ^ 4) * 16};
    const int times = kRows / kAtOnce - i * kTimes;  // may be more than kTimes
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
