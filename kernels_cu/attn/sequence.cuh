// Where a sequence lies and how long it really is: physical starts address memory, logical lengths bound the work.
//
// Rows count from the first row of their sequence. A sequence may be a part of a longer one: then row i stands at
// position_of() + i of the whole.
//
// Integers on the GPU come from the caller, unchecked. Whatever they hold, a sequence found here lies inside its array.
//
// kPlain: the host has checked that lengths are plain, one 32-bit number for each sequence and no starts. A kernel then
// has no code for other forms. Decoding uses it, since it must read lengths before anything else.
#pragma once

#include "attn/params.cuh"
#include "target/target.cuh"

DEVICE int64 integer_at(const Integers& integers, int64 index) {
  return integers.is_64bit ? static_cast<const int64*>(integers.data)[index]
                           : static_cast<const int*>(integers.data)[index];
}

DEVICE int64 clamp(int64 x, int64 low, int64 high) { return x < low ? low : (x > high ? high : x); }

struct Span {
  int64 start;  // first physical row, inside the batch entry in batch mode
  int length;   // logical rows
};

constexpr int kLongest = 0x7fff0000;  // rows of a sequence, at most: the end of its last tile still fits an int

// Clamps a number of rows to [0, kLongest].
DEVICE int rows_of_integer(int64 rows) { return static_cast<int>(clamp(rows, 0, kLongest)); }
// The same of a number in memory. One of 32 bits takes no 64-bit arithmetic.
template <bool kPlain>
DEVICE int rows_at(const Integers& integers, int64 index) {
  if (!kPlain && integers.is_64bit) return rows_of_integer(static_cast<const int64*>(integers.data)[index]);
  const int rows = static_cast<const int*>(integers.data)[index];
  return rows < 0 ? 0 : (rows < kLongest ? rows : kLongest);
}

constexpr int kLastPosition = 1 << 30;  // so that sums and differences of two positions fit an int

// The position of a sequence's first row in the whole sequence. kGiven: whether the call has positions.
template <bool kGiven>
DEVICE int position_of(const Side& side, int sequence) {
  if (!kGiven || side.position.data == nullptr) return 0;
  return static_cast<int>(clamp(integer_at(side.position, sequence), 0, kLastPosition));
}

// Where a sequence lies on one side.
template <bool kPlain = false>
DEVICE Span span_of(const Side& side, int sequence) {
  int64 start = 0;
  int room = rows_of_integer(side.rows);
  if (!kPlain && side.start.data != nullptr) {
    start = clamp(integer_at(side.start, sequence), 0, side.rows);
    room = rows_of_integer(clamp(integer_at(side.start, sequence + 1), start, side.rows) - start);
  }
  int length = room;
  if (side.length.data != nullptr) {
    if (!kPlain && side.cumulative) {
      // Unsigned, since the difference of unchecked integers may overflow.
      typedef unsigned long long Bits;
      const Bits begin = integer_at(side.length, sequence), end = integer_at(side.length, sequence + 1);
      length = rows_of_integer(static_cast<int64>(end - begin));
    } else {
      length = rows_at<kPlain>(side.length, sequence);
    }
    if (length > room) length = room;
  }
  return {start, length};
}
