// Copies rows of an array in global memory, which are read only once, to a tile of rows in shared memory, by one wave.
//
// This is RowCopy::load with less arithmetic for each tile: a lane computes one address in shared memory, and its other
// rows are constant distances away from it.
#pragma once

#include "target/target.cuh"
#include "tile/copy.cuh"

// The parameters are those of RowCopy.
template <class T, int kRows, int kColumns, int kPadded, int kPitch, int kBytes>
struct WaveCopy {
  static constexpr int kChunk = kBytes / int(sizeof(T));
  static constexpr int kChunks = kPadded / kChunk;
  static constexpr int kPerRow =
      power_of_two_from(kChunks) < target::kWave ? power_of_two_from(kChunks) : target::kWave;
  static constexpr int kStep = target::kWave / kPerRow;
  static constexpr int kPasses = (kRows + kStep - 1) / kStep;
  static constexpr int kAtOnce = kPasses < 8 ? kPasses : 8;
  static_assert(kColumns % kChunk == 0, "an access must not straddle the end of a row");

  // Copies rows that begin at `first` and lie `stride` elements apart. Rows that are not real are not read and become
  // zeros.
  template <class Valid>
  DEVICE static void load(T* tile, const T* first, int64 stride, const Valid& valid, int lane) {
    const int own = lane / kPerRow;
    const T* row = first + own * stride;
    const int64 step = kStep * stride;
    copy(tile, valid, lane, [&](int) {
      const T* const now = row;
      row += step;
      return now;
    });
  }

  // The same for rows anywhere: row n begins `offsets[n]` elements behind the array's first one.
  template <class Valid>
  DEVICE static void load(T* tile, const T* array, const int64* offsets, const Valid& valid, int lane) {
    copy(tile, valid, lane, [&](int row) { return array + offsets[row < kRows ? row : kRows - 1]; });
  }

 private:
  // rows(n): the address of row n. It is called once for each of a lane's rows, in order.
  template <class Valid, class Rows>
  DEVICE static void copy(T* tile, const Valid& valid, int lane, const Rows& rows) {
    const int own = lane / kPerRow, first_column = lane % kPerRow * kChunk;
    T* const first = tile + own * kPitch + first_column;
    unsigned to = 0;
    if constexpr (kBytes >= 4) to = target::shared_address(first);
#pragma unroll(kPasses <= 16 ? kPasses / kAtOnce : 1)
    for (int base = 0; base < kPasses; base += kAtOnce) {
      // All addresses are read before the first copy: the compiler may not move a read across a copy.
      const T* from[kAtOnce];
      UNROLL for (int n = 0; n < kAtOnce; n++) from[n] = rows((base + n) * kStep + own) + first_column;
      UNROLL for (int n = 0; n < kAtOnce; n++) {
        const int row = (base + n) * kStep + own;
        if (kRows % (kStep * kAtOnce) != 0 && row >= kRows) continue;
        const bool real = is_real(valid, row);
        UNROLL for (int more = 0; more < kChunks * kChunk; more += kPerRow * kChunk) {
          const int column = first_column + more, at = (base + n) * kStep * kPitch + more;
          if (kChunks % kPerRow != 0 && column >= kPadded) continue;
          const bool inside = real && (kColumns == kPadded || column < kColumns);
          if constexpr (kBytes >= 4) {
            target::copy_async_evict_first<kBytes>(to + at * int(sizeof(T)), from[n] + more, inside);
          } else {
            first[at] = inside ? from[n][more] : T{};
          }
        }
      }
    }
  }
};
