// Writes the mask of a call on gathered keys (portable/kept_setup.cu): which entries of the list of kept keys each row
// sees. These are all entries that are keys, within the row's limits. A thread writes one half-word (16 entries) of
// several rows, and reads its entries once.
#pragma once

#include "attn/kept_keys.cuh"
#include "attn/helper_params.cuh"
#include "target/target.cuh"

// The keys that neighbouring rows see by their limits: [first, last], and those below `sink` that are not beyond last.
struct KeptRange {
  int64 first, last, sink;

  // The keys that each of the rows [a, b] sees, and those that any of these rows sees.
  DEVICE static KeptRange intersection_of_rows(const KeptLimits& p, int a, int b) {
    return {b + p.first, a + p.last, p.sink};
  }
  DEVICE static KeptRange union_of_rows(const KeptLimits& p, int a, int b) { return {a + p.first, b + p.last, p.sink}; }

  DEVICE bool has(int key) const { return key <= last && (key >= first || key < sink); }
  // Whether all of the keys [least, most] are in it; whether it is certain that none of them is.
  DEVICE bool has_each(int least, int most) const { return most <= last && (least >= first || most < sink); }
  DEVICE bool has_none(int least, int most) const { return least > last || (most < first && least >= sink); }
};

namespace kept_mask {

constexpr int kThreads = config::kThreads;
constexpr int kWords = 16;                // neighbouring half-words of a row that a block writes
constexpr int kStep = kThreads / kWords;  // rows that a block writes at once
constexpr int kRows = config::kMaskRows;  // rows that a block writes
static_assert(kRows % kStep == 0, "threads take equally many rows");

// The entries of a half-word.
struct Entries {
  int keys[16];  // -1: none
  unsigned real = 0;
  int least = 0x7fffffff, most = -1;

  DEVICE Entries(const KeptList& kept, int word) {
    UNROLL for (int n = 0; n < 16; n++) {
      const int entry = word * 16 + n;
      // A mask with one key for all is stored as 128 keys like it (rawattn/_masks/layout.py).
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
    to[int64(row) * p.words] =
        static_cast<unsigned short>(entries.bits(KeptRange::intersection_of_rows(limits, row, row)));
  }
  if (first != 0) return;
  const KeptRange any = KeptRange::union_of_rows(limits, 0, limits.rows - 1);
  p.keys[int64(plane) * p.words + word] = static_cast<unsigned short>(entries.bits(any));
}

}  // namespace kept_mask
