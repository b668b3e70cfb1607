// A wave's share of what a tile of the backward adds to dQ (portable/backward.cu). dS of the tile lies in shared memory
// transposed: keys are rows.
#pragma once

#include "target/target.cuh"
#include "tile/copy.cuh"

// kPitch: that of the tile of keys. kPitchP: that of dS. kWaves: how many waves share dQ of a tile.
template <class M, class T, int kTileQ, int kTileK, int kPitch, int kPitchP, int kWaves>
struct DqShare {
  using C = typename M::C;
  static constexpr int kRowWaves = config::kDqRowWaves;
  // dQ is divided among the waves in its own way: into kRowWaves bands of rows, each band by columns.
  static constexpr int kColumnWaves = kWaves / kRowWaves;
  static constexpr int kRowBlocks = kTileQ / (16 * kRowWaves);
  static constexpr int kBlocks = config::kDqPitch / 16;
  static constexpr int kColumnBlocks = (kBlocks + kColumnWaves - 1) / kColumnWaves;
  static_assert(kRowBlocks * 16 * kRowWaves == kTileQ && kColumnWaves * kRowWaves == kWaves, "waves share dQ evenly");

  // Where dq itself is stored (kOneKeyTile): its rows, each `factor` times the product.
  struct Result {
    T* first;
    int64 stride;
    float factor;
  };

  // Adds dS K to the float32 sums in memory; with kOneKeyTile stores it as the result instead. gradients: dS^T, whose
  // rows are keys. rows: how many query rows are real. stride: between rows of `sums`.
  DEVICE static void add(float* sums, int64 stride, const Result& result, int rows, const T* gradients, const T* keys,
                         int wave, int lane) {
    const int row = wave % kRowWaves * kRowBlocks * 16;
    const int block = wave / kRowWaves * kColumnBlocks;
    // A wave that has no columns leaves. One that has fewer than kColumnBlocks computes as many as the others, since a
    // branch inside the products would hold up each of them: it reads beyond the keys' columns, but gives out only its
    // own.
    if (kColumnWaves > (kBlocks + kColumnBlocks - 1) / kColumnBlocks && block >= kBlocks) return;
    C dq[kRowBlocks][kColumnBlocks];
    UNROLL for (int m = 0; m < kRowBlocks; m++) { UNROLL for (int d = 0; d < kColumnBlocks; d++) dq[m][d] = C{}; }
    constexpr int kKeySteps = kTileK / M::kDepth;
    constexpr int kKeyUnroll = kKeySteps <= 8 ? kKeySteps : 4;
#pragma unroll kKeyUnroll
    for (int step = 0; step < kKeySteps; step++) {
      typename M::A a[kRowBlocks];
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        a[m] = M::load_a_columns(gradients + step * M::kDepth * kPitchP + row + m * 16, kPitchP, lane);
      }
      UNROLL for (int d = 0; d < kColumnBlocks; d++) {
        const typename M::B b = M::load_b_columns(keys + step * M::kDepth * kPitch + (block + d) * 16, kPitch, lane);
        UNROLL for (int m = 0; m < kRowBlocks; m++) M::multiply_add(dq[m][d], a[m], b);
      }
    }
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const int at = row + m * 16 + C::row(lane, slot);
        if (at >= rows) continue;
        if constexpr (config::kOneKeyTile) {
          UNROLL for (int d = 0; d < kColumnBlocks; d++) store(result, at, (block + d) * 16, dq[m][d], slot, lane);
        } else {
          float* const sum = sums + at * stride + C::position(C::column(lane, C::element(slot, 0)));
          UNROLL for (int d = 0; d < kColumnBlocks; d++) {
            if (block + d >= kBlocks) break;
            float run[C::kRun];
            UNROLL for (int i = 0; i < C::kRun; i++) run[i] = dq[m][d].x[C::element(slot, i)];
            target::atomic_add(sum + (block + d) * 16, run);
          }
        }
      }
    }
  }

 private:
  // Stores what a lane has of one row in one block of columns.
  DEVICE static void store(const Result& result, int row, int first_column, const C& dq, int slot, int lane) {
    constexpr int kAtOnce = C::kRun % 2 == 0 && config::kCopyBytes >= 2 * int(sizeof(T)) ? 2 : 1;
    UNROLL for (int i = 0; i < C::kRun; i += kAtOnce) {
      const int column = first_column + C::column(lane, C::element(slot, i));
      if (column >= config::kHeadDim) continue;
      alignas(8) T y[kAtOnce];
      UNROLL for (int j = 0; j < kAtOnce; j++) y[j] =
          target::from_float<T>(result.factor * dq.x[C::element(slot, i + j)]);
      using Access = Chunk<kAtOnce* int(sizeof(T))>;
      *reinterpret_cast<Access*>(result.first + row * result.stride + column) = *reinterpret_cast<const Access*>(y);
    }
  }
};
