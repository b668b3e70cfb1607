// Which sequence a physical row belongs to, for kernels that visit all rows.
#pragma once

#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

struct PhysicalRow {
  bool logical;  // false: padding, or no row at all
  int64 batch;   // index into the batch axis: 0 in packed mode
  int64 row;     // index into the row axis
  // Of a logical row:
  int sequence;
  int at;      // its position in the sequence
  int length;  // of the sequence
};

// The last packed sequence that starts at a row or before it: empty ones start there too. Looked for by a lane, or by
// all lanes of a wave together: of so many sequences at a time the starts are on their way at once.
template <bool kByWave>
DEVICE int sequence_at(const Side& side, int batch, int64 row) {
  int low = 0;
  if constexpr (kByWave) {
    int count = batch;  // of sequences from `low` on
    while (count > 1) {
      const int step = (count + target::kWave - 1) / target::kWave;
      const int own = target::thread_index() % target::kWave * step;
      const int reached = target::wave_count(own < count && integer_at(side.start, low + own) <= row);
      const int skipped = reached > 0 ? (reached - 1) * step : 0;
      low += skipped;
      count = step < count - skipped ? step : count - skipped;
    }
  } else {
    int high = batch;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (integer_at(side.start, middle) <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
  }
  return low;
}

// index: of the row in the whole array. kByWave: the same one for all lanes of a wave.
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
  const int sequence = sequence_at<kByWave>(side, batch, index);
  const Span span = span_of(side, sequence);
  const bool logical = index >= span.start && index < span.start + span.length;
  return {logical, 0, index, sequence, static_cast<int>(index - span.start), span.length};
}
