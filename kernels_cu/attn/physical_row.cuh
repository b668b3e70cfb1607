// Which sequence a physical row of an array belongs to, and at which position, for kernels that visit all rows.
#pragma once

#include "attn/params.cuh"
#include "attn/search.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

struct PhysicalRow {
  bool logical;  // false: padding, or no row at all
  int64 batch;   // index into the batch axis: 0 in packed mode
  int64 row;     // index into the row axis
  // Meaningful for logical rows only:
  int sequence;
  int at;      // its position in the sequence
  int length;  // of the sequence
};

// index: of the row in the whole array. kByWave: all lanes of a wave have the same index, and search together.
template <bool kByWave = false>
DEVICE PhysicalRow physical_row(const Side& side, int batch, int64 index) {
  if (side.start.data == nullptr) {
    const int64 sequence = side.rows > 0 ? index / side.rows : batch;
    if (sequence >= batch) return {false, 0, 0, 0, 0, 0};
    const int64 row = index - sequence * side.rows;
    const int length = span_of(side, static_cast<int>(sequence)).length;
    return {row < length, sequence, row, static_cast<int>(sequence), static_cast<int>(row), length};
  }
  if (batch == 0 || index >= side.rows) return {false, 0, 0, 0, 0, 0};
  // The last sequence that starts at the row or before it: empty ones before it may start at the same row.
  const auto starts = [&](int n) { return integer_at(side.start, n) <= index; };
  const int sequence = kByWave ? last_by_wave(batch, starts) : last_of(batch, starts);
  const Span span = span_of(side, sequence);
  const bool logical = index >= span.start && index < span.start + span.length;
  return {logical, 0, index, sequence, static_cast<int>(index - span.start), span.length};
}
