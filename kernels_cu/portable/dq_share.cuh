// A wave's share of what a tile adds to dQ, where dS of the tile lies in shared memory, keys being rows.
#pragma once

#include "target/target.cuh"

// kPitch: of keys, kPitchP: of dS. kWaves share a tile.
template <class M, class T, int kTileQ, int kTileK, int kPitch, int kPitchP, int kWaves>
struct DqShare {
  using C = typename M::C;
  static constexpr int kRowWaves = config::kDqRowWaves;
  // The waves divide dQ anew: kRowWaves bands of rows, the columns among the waves of a band.
  static constexpr int kColumnWaves = kWaves / kRowWaves;
  static constexpr int kRowBlocks = kTileQ / (16 * kRowWaves);
  static constexpr int kBlocks = config::kDqPitch / 16;
  static constexpr int kColumnBlocks = (kBlocks + kColumnWaves - 1) / kColumnWaves;
  static_assert(kRowBlocks * 16 * kRowWaves == kTileQ && kColumnWaves * kRowWaves == kWaves, "waves share dQ evenly");

  // dQ = dS K, added to the sums in memory. `gradients` is dS^T: keys are rows.
  DEVICE static void add(float* sums, int64 stride, int rows, const T* gradients, const T* keys, int wave, int lane) {
    const int row = wave % kRowWaves * kRowBlocks * 16;
    const int block = wave / kRowWaves * kColumnBlocks;
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
        if (kBlocks % kColumnBlocks != 0 && block + d >= kBlocks) break;
        const typename M::B b = M::load_b_columns(keys + step * M::kDepth * kPitch + (block + d) * 16, kPitch, lane);
        UNROLL for (int m = 0; m < kRowBlocks; m++) M::multiply_add(dq[m][d], a[m], b);
      }
    }
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const int at = row + m * 16 + C::row(lane, slot);
        if (at >= rows) continue;
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
};
