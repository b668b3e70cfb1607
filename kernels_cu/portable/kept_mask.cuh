// Writes which of the kept keys each row sees: all that are keys, within the limits of the rows. A thread takes a
// half-word in several rows, whose keys it reads once.
#pragma once

#include "attn/kept_keys.cuh"
#include "attn/params.cuh"
#include "target/target.cuh"

// The keys that neighbouring rows see by their limits.
struct KeptRange {
  int64 first, last, sink;

  // Those that each of the rows [a, b] sees, and those that any of them does.
  DEVICE static KeptRange of_each(const KeptLimits& p, int a, int b) { return {b + p.first, a + p.last, p.sink}; }
  DEVICE static KeptRange of_any(const KeptLimits& p, int a, int b) { return {a + p.first, b + p.last, p.sink}; }

  DEVICE bool has(int key) const { return key <= last && (key >= first || key < sink); }
  // Of the keys [least, most]: whether it has each, and whether it has none for certain.
  DEVICE bool has_each(int least, int most) const { return most <= last && (least >= first || most < sink); }
  DEVICE bool has_none(int least, int most) const { return least > last || (most < first && least >= sink); }
};

namespace kept_mask {

constexpr int kThreads = config::kThreads;
constexpr int kWords = 16;  // that a block takes, next to each other
constexpr int kStep = kThreads / kWords;
constexpr int kRows = config::kMaskRows;  // that a block takes
static_assert(kRows % kStep == 0, "threads take equally many rows");

// The entries of a half-word.
struct Entries {
  int keys[16];  // -1: none
  unsigned real = 0;
  int least = 0x7fffffff, most = -1;

  DEVICE Entries(const KeptList& kept, int word) {
    UNROLL for (int n = 0; n < 16; n++) {
      const int entry = word * 16 + n;
      // One entry is written as 128 of it.
      const bool there = entry < kept.count || kept.count == 1;
      keys[n] = there ? kept.key(entry < kept.count ? entry : kept.count - 1) : -1;
      if (keys[n] < 0) continue;
      real |= 1u << n;
      least = keys[n] < least ? keys[n] : least;
      most = keys[n] > most ? keys[n] : most;
    }
  }
  DEVICE unsigned bits(const KeptRange& range) const {
    if (real == 0 || range.has_none(least, most)) return 0;
    if (range.has_each(least, most)) return real;
    unsigned found = 0;
    UNROLL for (int n = 0; n < 16; n++) found |= unsigned(range.has(keys[n])) << n;
    return found & real;
  }
};

DEVICE void write(const KeptMaskParams& p, const KeptKeys& kept, const KeptLimits& limits, int block) {
  const int columns = (p.words + kWords - 1) / kWords;
  const int bands = (limits.rows + kRows - 1) / kRows;
  const int plane = block / columns / bands;
  const int word = block % columns * kWords + target::thread_index() % kWords;
  if (word >= p.words) return;
  const Entries entries(KeptList(kept, plane / p.nheads, plane % p.nheads), word);
  const int begin = block / columns % bands * kRows;
  const int end = limits.rows - begin < kRows ? limits.rows : begin + kRows;
  const int first = begin + target::thread_index() / kWords;
  unsigned short* const to = p.bits + int64(plane) * limits.rows * p.words + word;
  for (int row = first; row < end; row += kStep) {
    to[int64(row) * p.words] = static_cast<unsigned short>(entries.bits(KeptRange::of_each(limits, row, row)));
  }
  if (first != 0) return;
  const KeptRange any = KeptRange::of_any(limits, 0, limits.rows - 1);
  p.keys[int64(plane) * p.words + word] = static_cast<unsigned short>(entries.bits(any));
}

}  // namespace kept_mask
