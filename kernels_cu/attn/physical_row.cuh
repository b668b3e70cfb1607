// Which sequence a physical row belongs to, for kernels that visit all rows.
#pragma once

#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

struct PhysicalRow {
  bool logical;  // false: padding, or no row at all
  int64 batch;   // index into the batch axis: 0 in packed mode
  int64 row;     // index into the row axis
};

// index: of the row in the whole array.
DEVICE PhysicalRow physical_row(const Side& side, int batch, int64 index) {
  if (side.start.data == nullptr) {
    const int64 sequence = side.rows > 0 ? index / side.rows : batch;
    if (sequence >= batch) return {false, 0, 0};
    const int64 row = index - sequence * side.rows;
    return {row < span_of(side, static_cast<int>(sequence)).length, sequence, row};
  }
  // The last sequence that starts at the row or before it: empty ones start there too.
  int low = 0;
  int high = batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (integer_at(side.start, middle) <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  if (batch == 0 || index >= side.rows) return {false, 0, 0};
  const Span span = span_of(side, low);
  return {index >= span.start && index < span.start + span.length, 0, index};
}
