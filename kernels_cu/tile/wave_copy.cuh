// Rows of an array in global memory, which nobody reads again -> a tile of rows in shared memory, by one wave.
//
// As RowCopy, with what is the same for all tiles taken out of the way: a lane has one address in shared memory, from
// which those of its other rows are constants away.
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

  // From `first` on, at equal distances of `stride` elements. Rows that are not real become zeros and are not read.
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

  // `offsets[n]` elements from the array's first one on.
  template <class Valid>
  DEVICE static void load(T* tile, const T* array, const int64* offsets, const Valid& valid, int lane) {
    copy(tile, valid, lane, [&](int row) { return array + offsets[row < kRows ? row : kRows - 1]; });
  }

 private:
  // rows(n): where row n is. It is asked for a lane's rows in turn.
  template <class Valid, class Rows>
  DEVICE static void copy(T* tile, const Valid& valid, int lane, const Rows& rows) {
    const int own = lane / kPerRow, first_column = lane % kPerRow * kChunk;
    T* const first = tile + own * kPitch + first_column;
    unsigned to = 0;
    if constexpr (kBytes >= 4) to = target::shared_address(first);
#pragma unroll(kPasses <= 16 ? kPasses / kAtOnce : 1)
    for (int base = 0; base < kPasses; base += kAtOnce) {
      // All are known before the first copy, behind which no read may move.
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
            target::copy_async_once<kBytes>(to + at * int(sizeof(T)), from[n] + more, inside);
          } else {
            first[at] = inside ? from[n][more] : T{};
          }
        }
      }
    }
  }
};
