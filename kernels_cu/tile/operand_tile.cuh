// Tiles of rows in shared memory, which give B operands of products. `rows<M>(n, k, lane)` is the operand whose B[k][n]
// is column k of the tile's row n, from row n and column k on. `columns<M>(k, n, lane)` is the operand whose B[k][n] is
// column n of the tile's row k, from row k and column n on.
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
// The same for float8. `columns` gives columns in the order of column_of_float8(). `rows` gives the depth in another
// order, so the A operand must come from M::load_a_float8().
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

// 16-bit elements as TMA writes them with the 128-byte swizzle: blocks of 8 rows of 64 columns. The n-th run of 8
// elements of a row lies at place n xor (row % 8). The tile is aligned to 1024 bytes. kDown, kAcross: the distance from
// a block to the one with the next 8 rows, and to the one with the next columns, in elements.
template <int kDown, int kAcross, class T>
struct SwizzledTile {
  static_assert(sizeof(T) == 2, "a block has 64 columns");
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
  // The address of the 8 elements of a row from a column on. first_row and first_column, multiples of 8 and 16 that the
  // compiler knows, are apart from row and column, which depend on the lane.
  DEVICE const T* run(int first_row, int first_column, int row, int column) const {
    const int lanes = row / 8 * kDown + row % 8 * kColumns + (column ^ row % 8 * 8);
    return first + first_row / 8 * kDown + first_column / kColumns * kAcross + (lanes ^ first_column % kColumns);
  }
};

// The same for float8: blocks of 128 columns, in which runs of 16 elements change places.
template <int kDown, int kAcross>
struct SwizzledTile<kDown, kAcross, float8> {
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
    const int lanes = row / 8 * kDown + row % 8 * (kColumns + 16);
    return first + first_row / 8 * kDown + first_column / kColumns * kAcross + (lanes ^ first_column % kColumns);
  }
};

// The column of a float8 tile, in a block of 16, that a product has in its column n if `columns` of that tile was its B
// operand.
DEVICE constexpr int column_of_float8(int n) { return n % 8 * 2 + n / 8; }
