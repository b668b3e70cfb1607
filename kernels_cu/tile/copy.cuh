// Copies rows of an array in global memory to a tile of rows in shared memory, and back (RowCopy), by any number of
// threads.
#pragma once

#include "target/target.cuh"
#include "tile/nan.cuh"
#include "tile/rows.cuh"

DEVICE constexpr int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

DEVICE constexpr int power_of_two_from(int x) {
  int power = 1;
  while (power < x) power *= 2;
  return power;
}

// The pitch of a tile's rows. 16 bytes of padding make it an odd number of 16-byte units, so that the eight rows of a
// matrix load touch every bank once.
template <class T>
DEVICE constexpr int padded_pitch(int columns) {
  return columns + 16 / int(sizeof(T));
}

template <int kBytes>
struct Chunk;
template <>
struct Chunk<2> {
  unsigned short x;
};
template <>
struct Chunk<4> {
  unsigned x;
};
template <>
struct alignas(8) Chunk<8> {
  unsigned x, y;
};
template <>
struct alignas(16) Chunk<16> {
  unsigned x, y, z, w;
};

// Whether a row of a tile is real, which means that it is read: one of the first `valid` rows, or one that `real`
// accepts.
DEVICE bool is_real(int valid, int row) { return row < valid; }
template <class Rows>
DEVICE bool is_real(const Rows& real, int row) {
  return real(row);
}

// Whether all of the first `rows` rows are real.
DEVICE bool all_real(int valid, int rows) { return rows <= valid; }
template <class Rows>
DEVICE bool all_real(const Rows& real, int rows) {
  return real.all(rows);
}

// For tiles whose rows are all real.
struct AllReal {
  DEVICE bool operator()(int) const { return true; }
  DEVICE bool all(int) const { return true; }
};

// kColumns columns of a row are real; in the tile, zeros follow them up to kPadded. kBytes is the widest access that
// every row of the array allows.
template <class T, int kRows, int kColumns, int kPadded, int kPitch, int kThreads, int kBytes>
struct RowCopy {
  static constexpr int kChunk = kBytes / int(sizeof(T));
  static constexpr int kChunks = kPadded / kChunk;
  static constexpr int kEven = kThreads & -kThreads;  // the largest power of two that divides it
  static constexpr int kPerRow = power_of_two_from(kChunks) < kEven ? power_of_two_from(kChunks) : kEven;
  static constexpr int kStep = kThreads / kPerRow;
  static_assert(kThreads % kPerRow == 0, "every thread has a column of each row that it visits");
  static_assert(kColumns % kChunk == 0, "an access must not straddle the end of a row");

  // Calls visit(row, column, address) for each of this thread's chunks: its row and column in the tile, its address in
  // the array. Addresses of strided rows advance by one addition a row.
  template <class Rows, class Visit>
  DEVICE static void each_chunk(const Rows& rows, int thread, const Visit& visit) {
    const int first_row = thread / kPerRow;
    const int first_column = thread % kPerRow * kChunk;
    Rows at = rows.from(first_row).shifted(first_column);
    constexpr int kPasses = (kRows + kStep - 1) / kStep;
    constexpr int kUnroll = kPasses <= 16 ? kPasses : 8;
#pragma unroll kUnroll
    for (int pass = 0; pass < kPasses; pass++) {
      const int row = pass * kStep + first_row;
      if (kRows % kStep != 0 && row >= kRows) break;
      UNROLL for (int base = 0; base < kChunks * kChunk; base += kPerRow * kChunk) {
        const int column = base + first_column;
        if (kChunks % kPerRow == 0 || column < kPadded) visit(row, column, at.address() + base);
      }
      at = at.from(kStep);
    }
  }

  // Rows that are not real are not read and become zeros. valid: see is_real().
  template <class Rows, class Valid>
  DEVICE static void load(T* tile, const Rows& rows, const Valid& valid, int thread) {
    if constexpr (kBytes >= 4) {
      each_chunk(rows, thread, [&](int row, int column, const T* source) {
        const bool real = is_real(valid, row) && (kColumns == kPadded || column < kColumns);
        target::copy_async<kBytes>(tile + row * kPitch + column, source, real);
      });
    } else {
      load_single(tile, rows, valid, thread);
    }
  }

  // Loads single 16-bit elements, which no asynchronous copy takes. Each thread issues kAtOnce loads before it stores
  // the first, so their latencies overlap. It goes down a column, so that the address advances by one addition.
  template <class Rows, class Valid>
  DEVICE static void load_single(T* tile, const Rows& rows, const Valid& valid, int thread) {
    constexpr int kAtOnce = 8;
    const int first_row = thread / kPerRow;
    UNROLL for (int column = thread % kPerRow; column < kPadded; column += kPerRow) {
      Rows at = rows.from(first_row).shifted(column);
      for (int base = first_row; base < kRows; base += kAtOnce * kStep) {
        T piece[kAtOnce];
        UNROLL for (int n = 0; n < kAtOnce; n++) {
          piece[n] = is_real(valid, base + n * kStep) && column < kColumns ? *at.address() : T{};
          at = at.from(kStep);
        }
        UNROLL for (int n = 0; n < kAtOnce; n++) {
          const int row = base + n * kStep;
          if (row < kRows) tile[row * kPitch + column] = piece[n];
        }
      }
    }
  }

  // As store(). Returns whether any element that the thread has stored is NaN or an infinity.
  template <class Rows>
  DEVICE static bool store_and_look(const Rows& rows, int valid, const T* tile, int thread) {
    NanSum<T> sum;
    each_chunk(rows, thread, [&](int row, int column, T* destination) {
      if (row < valid && (kColumns == kPadded || column < kColumns)) {
        const auto chunk = *reinterpret_cast<const Chunk<kBytes>*>(tile + row * kPitch + column);
        *reinterpret_cast<Chunk<kBytes>*>(destination) = chunk;
        sum.add_stored(chunk);
      }
    });
    return sum.any();
  }

  // Whether any element of the tile that the thread visits is NaN or an infinity.
  DEVICE static bool has_nan(const T* tile, int thread) {
    NanSum<T> sum;
    each_chunk(StridedRows<const T>{tile, kPitch}, thread,
               [&](int, int, const T* own) { sum.add_stored(*reinterpret_cast<const Chunk<kBytes>*>(own)); });
    return sum.any();
  }

  template <class Rows>
  DEVICE static void store(const Rows& rows, int valid, const T* tile, int thread) {
    each_chunk(rows, thread, [&](int row, int column, T* destination) {
      if (row < valid && (kColumns == kPadded || column < kColumns)) {
        *reinterpret_cast<Chunk<kBytes>*>(destination) =
            *reinterpret_cast<const Chunk<kBytes>*>(tile + row * kPitch + column);
      }
    });
  }
};
