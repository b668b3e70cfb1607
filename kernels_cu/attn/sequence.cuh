// Where a sequence lies and how long it really is: physical starts address memory, logical lengths bound the work.
//
// Rows are counted from the sequence's own first one. Where a sequence is a part of a longer one, Side will also have a
// `position` for each: of its first row in the whole. Row i then stands at position + i, and the offset of VisibleKeys
// is the position of the queries less that of the keys: the diagonal is that of the whole.
//
// Integers on the GPU are the caller's and nobody has checked them: whatever they hold, a sequence found here lies
// inside its array.
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

DEVICE Span span_of(const Side& side, int sequence) {
  int64 start = 0;
  int64 room = side.rows;
  if (side.start.data != nullptr) {
    start = clamp(integer_at(side.start, sequence), 0, side.rows);
    room = clamp(integer_at(side.start, sequence + 1), start, side.rows) - start;
  }
  int64 length = room;
  if (side.length.data != nullptr) {
    length = integer_at(side.length, sequence);
    if (side.cumulative) {
      // Unsigned, since the difference of unchecked integers may overflow.
      typedef unsigned long long Bits;
      length = static_cast<int64>(Bits(integer_at(side.length, sequence + 1)) - Bits(length));
    }
    length = clamp(length, 0, room);
  }
  constexpr int64 kLongest = 0x7fff0000;  // leaves an int room for a tile
  return {start, static_cast<int>(clamp(length, 0, kLongest))};
}
