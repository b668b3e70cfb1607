// Tiles of rows in shared memory, as B operands of products: `rows<M>(n, k, lane)` is B[k][n] from row n and column k
// on, `columns<M>(k, n, lane)` from row k and column n on.
#pragma once

#include "target/target.cuh"

// Rows kPitch elements apart.
template <int kPitch, class T>
struct PitchedTile {
  const T* first;

  template <class M>
  DEVICE typename M::B rows(int n, int k, int lane) const {
    return M::load_b_rows(first + n * kPitch + k, kPitch, lane);
  }
  template <class M>
  DEVICE typename M::B columns(int k, int n, int lane) const {
    return M::load_b_columns(first + k * kPitch + n, kPitch, lane);
  }
};
template <int kPitch, class T>
DEVICE PitchedTile<kPitch, T> pitched_tile(const T* first) {
  return {first};
}

// As the copy engine leaves 16-bit elements in the 128-byte swizzle: blocks of 64 columns, each of kRows rows of 128
// bytes, in which runs of 8 elements have changed places by an exclusive or with the row's number. Aligned to 1024
// bytes.
template <int kRows, class T>
struct SwizzledTile {
  static_assert(sizeof(T) == 2 && kRows % 8 == 0, "the swizzle repeats every 8 rows");
  static constexpr int kColumns = 64;
  const T* first;

  template <class M>
  DEVICE typename M::B rows(int n, int k, int lane) const {
    return M::load_b_rows_of([&](int row, int column) { return run(n, k, row, column); }, lane);
  }
  template <class M>
  DEVICE typename M::B columns(int k, int n, int lane) const {
    return M::load_b_columns_of([&](int row, int column) { return run(k, n, row, column); }, lane);
  }

 private:
  // The run of a row that begins with a column. What the lane says is apart from what the compiler knows, multiples of
  // 8 rows and of 16 columns.
  DEVICE const T* run(int first_row, int first_column, int row, int column) const {
    const int lanes = row * kColumns + (column ^ row % 8 * 8);
    return first + (first_column / kColumns * kRows + first_row) * kColumns + (lanes ^ first_column % kColumns);
  }
};
