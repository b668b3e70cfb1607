// How the portable decoding kernel finds and copies a wave's tiles of keys and values, in pages or not. load() copies
// the last tile but one that was passed to look_up(): on a busy GPU, a page id takes longer to arrive than a tile takes
// to compute, so ids are asked for that far ahead.
//
// UnpagedTile is for keys that are not paged. With PageOfTile, tiles divide pages, so all rows of a tile lie in one
// page. With PageRows they may lie in several: each lane looks up some rows and tells the others through shared memory
// where they are.
#pragma once

#include "attn/pages.cuh"
#include "target/target.cuh"
#include "tile/rows.cuh"

struct UnpagedTile {
  int row, next_row;  // the first row of the last tile but one that was looked up, and of the last

  UnpagedTile() = default;
  DEVICE UnpagedTile(const Pages&, int, const Span&) {}
  DEVICE void look_up(int first, int) {
    row = next_row;
    next_row = first;
  }
  DEVICE void write_offsets(int64*, const Strides&, const Strides&, int) const {}
  template <class Copy, bool kValues, class T, class Array, class Real>
  DEVICE void load(T* tile, Array* array, const Strides& strides, const int64*, const Real& real, int lane) const {
    Copy::load(tile, array + row * strides.row, strides.row, real, lane);
  }
};

// For tiles of kRows keys that divide pages.
template <int kRows, bool kPlain>
struct PageOfTile {
  PageTable<kPlain> table;
  typename PageTable<kPlain>::Id id, next_id;
  int row, next_row;  // the first row of a tile, in its page

  PageOfTile() = default;
  DEVICE PageOfTile(const Pages& pages, int sequence, const Span& keys)
      : table(page_table<kPlain>(pages, sequence, keys)) {}

  DEVICE void look_up(int first, int) {
    const int entry = table.entry(first);
    id = next_id;
    row = next_row;
    next_row = first - entry * table.page_rows;
    next_id = table.id(entry);
  }
  DEVICE void write_offsets(int64*, const Strides&, const Strides&, int) const {}
  template <class Copy, bool kValues, class T, class Array, class Real>
  DEVICE void load(T* tile, Array* array, const Strides& strides, const int64*, const Real& real, int lane) const {
    Copy::load(tile, array + table.page_of(id) * strides.batch + row * strides.row, strides.row, real, lane);
  }
};

// For tiles of kRows keys that may cross pages.
template <int kRows, bool kPlain>
struct PageRows {
  // Rows that a lane finds, of the kRows rows of keys and as many of values.
  static constexpr int kFinds = (2 * kRows + target::kWave - 1) / target::kWave;

  PageTable<kPlain> table;
  typename PageTable<kPlain>::Id ids[kFinds], next_ids[kFinds];
  int first, next_first;  // the first rows of these tiles

  PageRows() = default;
  DEVICE PageRows(const Pages& pages, int sequence, const Span& keys)
      : table(page_table<kPlain>(pages, sequence, keys)) {}

  DEVICE void look_up(int row, int lane) {
    first = next_first;
    next_first = row;
    UNROLL for (int n = 0; n < kFinds; n++) ids[n] = next_ids[n];
    UNROLL for (int n = 0; n < kFinds; n++) next_ids[n] = table.id(table.entry(row + of_lane(n, lane)));
  }

  // Writes where the rows of the tile to be loaded are: those of keys, then those of values, in elements from the first
  // page of the array.
  DEVICE void write_offsets(int64* offsets, const Strides& keys, const Strides& values, int lane) const {
    UNROLL for (int n = 0; n < kFinds; n++) {
      const int which = n * target::kWave + lane;
      const int row = first + of_lane(n, lane);
      const Strides& strides = which < kRows ? keys : values;
      const int in_page = row - table.entry(row) * table.page_rows;
      if (which < 2 * kRows) offsets[which] = table.page_of(ids[n]) * strides.batch + in_page * strides.row;
    }
  }

  // To be called after write_offsets(), first for keys, then for values. Afterwards `offsets` may be written again.
  template <class Copy, bool kValues, class T, class Array, class Real>
  DEVICE void load(T* tile, Array* array, const Strides&, const int64* offsets, const Real& real, int lane) const {
    if constexpr (!kValues) target::wave_sync();
    Copy::load(tile, array, offsets + (kValues ? kRows : 0), real, lane);
    if constexpr (kValues) target::wave_sync();
  }

 private:
  DEVICE static int of_lane(int n, int lane) { return (n * target::kWave + lane) % kRows; }
};
