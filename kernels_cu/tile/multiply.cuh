// Products of a wave's row blocks, of 16 rows each, with tiles in shared memory. `operand(m, step)` is the A operand of
// row block m at one step of the depth. B operands come from the tile; each is loaded once and serves all row blocks.
#pragma once

#include "target/target.cuh"
#include "tile/accumulator.cuh"
#include "tile/operand_tile.cuh"

// X += A B, where B[k][n] is column k of the tile's row n: dot products with the tile's rows, as in Q K^T.
template <class M, int kSteps, int kUnrolled, class C, int kRowBlocks, int kColumnBlocks, class Operand, class Tile>
DEVICE void add_product_with_rows(C (&x)[kRowBlocks][kColumnBlocks], const Operand& operand, const Tile& tile,
                                  int lane) {
#pragma unroll kUnrolled
  for (int step = 0; step < kSteps; step++) {
    typename M::A a[kRowBlocks];
    UNROLL for (int m = 0; m < kRowBlocks; m++) a[m] = operand(m, step);
    UNROLL for (int n = 0; n < kColumnBlocks; n++) {
      const typename M::B b = tile.template rows<M>(n * 16, step * M::kDepth, lane);
      UNROLL for (int m = 0; m < kRowBlocks; m++) M::multiply_add(x[m][n], a[m], b);
    }
  }
}

// X = A B with the same B.
template <class M, int kSteps, int kUnrolled, class C, int kRowBlocks, int kColumnBlocks, class Operand, class Tile>
DEVICE void product_with_rows(C (&x)[kRowBlocks][kColumnBlocks], const Operand& operand, const Tile& tile, int lane) {
  UNROLL for (int m = 0; m < kRowBlocks; m++) { UNROLL for (int n = 0; n < kColumnBlocks; n++) x[m][n] = C{}; }
  add_product_with_rows<M, kSteps, kUnrolled>(x, operand, tile, lane);
}

// X += A B, where B[k][n] is column n of the tile's row k: sums of the tile's rows weighted by A, as in P V.
template <class M, int kSteps, int kUnrolled, class C, int kRowBlocks, int kColumnBlocks, class Operand, class Tile>
DEVICE void add_product_with_columns(C (&x)[kRowBlocks][kColumnBlocks], const Operand& operand, const Tile& tile,
                                     int lane) {
#pragma unroll kUnrolled
  for (int step = 0; step < kSteps; step++) {
    typename M::A a[kRowBlocks];
    UNROLL for (int m = 0; m < kRowBlocks; m++) a[m] = operand(m, step);
    UNROLL for (int n = 0; n < kColumnBlocks; n++) {
      const typename M::B b = tile.template columns<M>(step * M::kDepth, n * 16, lane);
      UNROLL for (int m = 0; m < kRowBlocks; m++) M::multiply_add(x[m][n], a[m], b);
    }
  }
}

// X += P B with the B of add_product_with_columns(). P is in the wave's accumulators. Where an accumulator cannot serve
// as an operand, P goes through `slab`, rows of shared memory that the wave has to itself.
template <class M, int kUnrolled, int kPitchP, class C, int kRowBlocks, int kColumnBlocks, int kDepthBlocks, class T,
          class Tile>
DEVICE void multiply_accumulators(C (&x)[kRowBlocks][kColumnBlocks], const C (&p)[kRowBlocks][kDepthBlocks], T* slab,
                                  const Tile& tile, int lane) {
  if constexpr (!M::kAccumulatorFeedsA) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int n = 0; n < kDepthBlocks; n++) {
        store_accumulator<M>(p[m][n], slab + m * 16 * kPitchP + n * 16, kPitchP, lane);
      }
    }
    target::wave_sync();
  }
  const auto operand = [&](int m, int step) {
    if constexpr (M::kAccumulatorFeedsA) {
      return M::from_accumulator(p[m][step]);
    } else {
      return M::load_a(slab + m * 16 * kPitchP + step * M::kDepth, kPitchP, lane);
    }
  };
  add_product_with_columns<M, kDepthBlocks * 16 / M::kDepth, kUnrolled>(x, operand, tile, lane);
  if constexpr (!M::kAccumulatorFeedsA) target::wave_sync();
}
