// A wave's tiles of keys and values, in pages or not: what is loaded is the last tile but one that was looked up. Under
// load, the id of a page takes longer to come than a tile to be computed.
//
// If tiles divide pages, the rows of one are in one page. Else each lane looks up some rows of a tile and tells the
// others through shared memory where they are.
#pragma once

#include "attn/pages.cuh"
#include "target/target.cuh"
#include "tile/rows.cuh"

// Keys and values in no pages.
struct NoPages {
  int row, next_row;  // the first of the last tile but one, and of the last

  NoPages() = default;
  DEVICE NoPages(const Pages&, int, const Span&) {}
  DEVICE void look_up(int first, int) {
    row = next_row;
    next_row = first;
  }
  DEVICE void tell(int64*, const Strides&, const Strides&, int) const {}
  template <class Copy, bool kValues, class T, class Array, class Real>
  DEVICE void load(T* tile, Array* array, const Strides& strides, const int64*, const Real& real, int lane) const {
    Copy::load(tile, array + row * strides.row, strides.row, real, lane);
  }
};

// Of tiles of kRows keys, which divide pages.
template <int kRows, bool kPlain>
struct PageOfTile {
  PageTable<kPlain> table;
  typename PageTable<kPlain>::Id id, next_id;
  int row, next_row;  // the first of a tile, in the page

  PageOfTile() = default;
  DEVICE PageOfTile(const Pages& pages, int sequence, const Span& keys)
      : table(page_table<kPlain>(pages, sequence, keys)) {}

  DEVICE void look_up(int first, int) {
    const int entry = table.entry(first);
    id = next_id;
    row = next_row;
    next_row = first - entry * table.rows;
    next_id = table.id(entry);
  }
  DEVICE void tell(int64*, const Strides&, const Strides&, int) const {}
  template <class Copy, bool kValues, class T, class Array, class Real>
  DEVICE void load(T* tile, Array* array, const Strides& strides, const int64*, const Real& real, int lane) const {
    Copy::load(tile, array + table.page_of(id) * strides.batch + row * strides.row, strides.row, real, lane);
  }
};

// Of tiles of kRows keys, anywhere.
template <int kRows, bool kPlain>
struct PageRows {
  // A lane finds rows of keys, or of values, or of both.
  static constexpr int kFinds = (2 * kRows + target::kWave - 1) / target::kWave;

  PageTable<kPlain> table;
  typename PageTable<kPlain>::Id ids[kFinds], next_ids[kFinds];
  int first, next_first;  // rows of a tile

  PageRows() = default;
  DEVICE PageRows(const Pages& pages, int sequence, const Span& keys)
      : table(page_table<kPlain>(pages, sequence, keys)) {}

  DEVICE void look_up(int row, int lane) {
    first = next_first;
    next_first = row;
    UNROLL for (int n = 0; n < kFinds; n++) ids[n] = next_ids[n];
    UNROLL for (int n = 0; n < kFinds; n++) next_ids[n] = table.id(table.entry(row + of_lane(n, lane)));
  }

  // Where the rows of that tile are: keys, then values, in elements from the first page's.
  DEVICE void tell(int64* offsets, const Strides& keys, const Strides& values, int lane) const {
    UNROLL for (int n = 0; n < kFinds; n++) {
      const int which = n * target::kWave + lane;
      const int row = first + of_lane(n, lane);
      const Strides& strides = which < kRows ? keys : values;
      const int in_page = row - table.entry(row) * table.rows;
      if (which < 2 * kRows) offsets[which] = table.page_of(ids[n]) * strides.batch + in_page * strides.row;
    }
  }

  // Once they are told; then others may be told.
  template <class Copy, bool kValues, class T, class Array, class Real>
  DEVICE void load(T* tile, Array* array, const Strides&, const int64* offsets, const Real& real, int lane) const {
    if constexpr (!kValues) target::wave_sync();
    Copy::load(tile, array, offsets + (kValues ? kRows : 0), real, lane);
    if constexpr (kValues) target::wave_sync();
  }

 private:
  DEVICE static int of_lane(int n, int lane) { return (n * target::kWave + lane) % kRows; }
};
