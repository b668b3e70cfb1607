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
// Of these, what `columns` has are columns in the order of column_of_float8, and what `rows` has goes with
// M::load_a_float8.
template <int kPitch>
struct PitchedTile<kPitch, float8> {
  const float8* first;

  template <class M>
  DEVICE typename M::B rows(int n, int k, int lane) const {
    const auto run = [&](int row, int column) { return first + (n + row) * kPitch + k + column; };
    return M::load_b_rows_float8(run, lane);
  }
  template <class M>
  DEVICE typename M::B columns(int k, int n, int lane) const {
    const auto run = [&](int row, int column) { return first + (k + row) * kPitch + n + column; };
    return M::load_b_columns_float8(run, lane);
  }
};
template <int kPitch, class T>
DEVICE PitchedTile<kPitch, T> pitched_tile(const T* first) {
  return {first};
}

// As TMA leaves 16-bit elements in the 128-byte swizzle: blocks of 64 columns, each of kRows rows of 128
// bytes, in which runs of 8 elements are exchanged by an exclusive or with the row's number. Aligned to 1024
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

// Likewise: blocks of 128 columns, in which runs of 16 elements are exchanged.
template <int kRows>
struct SwizzledTile<kRows, float8> {
  static_assert(kRows % 8 == 0, "the swizzle repeats every 8 rows");
  static constexpr int kColumns = 128;
  const float8* first;

  template <class M>
  DEVICE typename M::B rows(int n, int k, int lane) const {
    return M::load_b_rows_float8([&](int row, int) { return run(n, k, row); }, lane);
  }
  template <class M>
  DEVICE typename M::B columns(int k, int n, int lane) const {
    return M::load_b_columns_float8([&](int row, int) { return run(k, n, row); }, lane);
  }

 private:
  DEVICE const float8* run(int first_row, int first_column, int row) const {
    const int lanes = row * kColumns + row % 8 * 16;
    return first + (first_column / kColumns * kRows + first_row) * kColumns + (lanes ^ first_column % kColumns);
  }
};

// The column of a block of 16 that a product has in its column n, where `columns` of a tile of float8 was an operand.
DEVICE constexpr int column_of_float8(int n) { return n % 8 * 2 + n / 8; }
