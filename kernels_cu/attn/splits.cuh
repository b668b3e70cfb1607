// Split-KV in the portable forward: several blocks share a query tile, each with a piece of its key tiles. This file
// says which key tiles a piece has, and merges the partial results of the pieces.
//
// Each wave leaves the partial result of its rows in global memory. The last block of a query tile to do so merges all
// pieces in the order of keys. So the bits of the result do not depend on which block is last, and no block waits for
// another.
#pragma once

#include "attn/exponent.cuh"
#include "attn/params.cuh"
#include "attn/tiles.cuh"
#include "target/target.cuh"

struct Piece {
  int index, count;  // among the pieces of the query tile; a block whose index is not below count has nothing to do

  Piece() = default;
  // tiles: key tiles of the query tile. A query tile without key tiles still has one piece, which writes its rows.
  DEVICE Piece(const Splits& splits, int64 block, int tiles) : index(static_cast<int>(block % splits.count)) {
    const int most = (tiles + splits.least - 1) / splits.least;
    count = most < 1 ? 1 : (most < splits.count ? most : splits.count);
  }
  DEVICE bool exists() const { return index < count; }
  // The piece's share of the query tile's key tiles. Shares differ by one tile at most.
  DEVICE TileSpan of(const TileSpan& span) const {
    const int64 tiles = span.count();
    return {span.begin + static_cast<int>(tiles * index / count),
            span.begin + static_cast<int>(tiles * (index + 1) / count)};
  }
};

// The partial result of a wave's rows in a piece: each lane's elements of the output, and the running maxima and sums
// of the lane's rows. The lanes' values lie side by side.
template <class C, int kRowBlocks, int kOutBlocks>
struct PiecePartial {
  struct alignas(16) Quad {
    float x[4];
  };
  static constexpr int kQuads = kRowBlocks * kOutBlocks * C::kElements / 4;
  static_assert(C::kElements % 4 == 0, "whole quads of each block");

  Quad out[kQuads][target::kWave];
  float running_max[kRowBlocks][C::kSlots][target::kWave];
  float sum[kRowBlocks][C::kSlots][target::kWave];

  // Stores a wave's rows. softmax.sum_rows() must come before.
  template <class Softmax>
  DEVICE void store(const C (&o)[kRowBlocks][kOutBlocks], const Softmax& softmax, int lane) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int d = 0; d < kOutBlocks; d++) {
        UNROLL for (int e = 0; e < C::kElements; e += 4) {
          const auto& x = o[m][d].x;
          out[((m * kOutBlocks + d) * C::kElements + e) / 4][lane] = {x[e], x[e + 1], x[e + 2], x[e + 3]};
        }
      }
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        running_max[m][slot][lane] = softmax.running_max[m][slot];
        sum[m][slot][lane] = softmax.sum[m][slot];
      }
    }
  }

  // Merges this piece into o and softmax. A piece whose row saw no key has an output of 0, and a weight of 0.
  template <class Softmax>
  DEVICE void merge(C (&o)[kRowBlocks][kOutBlocks], Softmax& softmax, int lane) const {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      float before[C::kSlots], weight[C::kSlots];
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const float last = softmax.running_max[m][slot];
        const float own = running_max[m][slot][lane];
        softmax.running_max[m][slot] = fmaxf(last, own);
        before[slot] = Exponent::power(last - softmax.shift(m, slot));
        weight[slot] = Exponent::power(own - softmax.shift(m, slot));
        softmax.sum[m][slot] = softmax.sum[m][slot] * before[slot] + sum[m][slot][lane] * weight[slot];
      }
      UNROLL for (int d = 0; d < kOutBlocks; d++) {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          const float x = out[((m * kOutBlocks + d) * C::kElements + e) / 4][lane].x[e % 4];
          o[m][d].x[e] = o[m][d].x[e] * before[C::slot(e)] + x * weight[C::slot(e)];
        }
      }
    }
  }
};

// Merges the pieces of a query tile into the accumulators of the last block to arrive. Returns false in all other
// blocks. All threads of the block call it. flag: any word of shared memory, where no copies or reads may be in flight.
// tile: the number of the query tile in the launch. has_rows: whether the wave has any real rows.
template <int kWaves, class C, int kRowBlocks, int kOutBlocks, class Softmax>
DEVICE bool merge_pieces(const Splits& splits, const Piece& piece, int64 tile, C (&o)[kRowBlocks][kOutBlocks],
                         Softmax& softmax, unsigned* flag, bool has_rows) {
  if (piece.count == 1) return true;
  using Partial = PiecePartial<C, kRowBlocks, kOutBlocks>;
  const int thread = target::thread_index();
  const int lane = thread % target::kWave, wave = thread / target::kWave;
  Partial* const partials = static_cast<Partial*>(splits.partials) + tile * splits.count * kWaves + wave;
  if (has_rows) partials[piece.index * kWaves].store(o, softmax, lane);
  // All stores of the block come before its arrival; the loads of the last block to arrive come after it.
  target::fence_device();
  target::block_sync();
  if (thread == 0) *flag = target::fetch_add(splits.arrived + tile, 1u) + 1 == static_cast<unsigned>(piece.count);
  target::block_sync();
  if (*flag == 0) return false;
  target::fence_device();
  if (thread == 0) splits.arrived[tile] = 0;  // for the next launch
  if (!has_rows) return true;
  UNROLL for (int m = 0; m < kRowBlocks; m++) {
    UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
      softmax.running_max[m][slot] = -target::infinity();
      softmax.sum[m][slot] = 0.0f;
    }
    UNROLL for (int d = 0; d < kOutBlocks; d++) o[m][d] = C{};
  }
#pragma unroll 1
  for (int n = 0; n < piece.count; n++) partials[n * kWaves].merge(o, softmax, lane);
  return true;
}
