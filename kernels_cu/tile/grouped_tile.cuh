// Tiles of rows in shared memory as TMA brings them in boxes of whole rows. See tile/operand_tile.cuh.
#pragma once

#include "target/target.cuh"

// 16-bit elements with the 128-byte swizzle: groups of 8 rows, one after the other, each of kBlocks blocks of 64
// columns. The n-th run of 8 elements of a row in a block lies at place n xor (row % 8). The tile is aligned to 1024
// bytes.
template <int kBlocks, class T>
struct GroupedTile {
  static_assert(sizeof(T) == 2, "a block has 64 columns");
  static constexpr int kColumns = 64, kBlock = 8 * kColumns;  // elements
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
    const int lanes = row / 8 * (kBlocks * kBlock) + row % 8 * kColumns + (column ^ row % 8 * 8);
    return first + (first_row / 8 * kBlocks + first_column / kColumns) * kBlock + (lanes ^ first_column % kColumns);
  }
};
