// Writes a mask of single keys, for the kernels portable/mask_of_*.cu, which supply its half-words. It has three
// arrays: the bits; a map that says of each granule, kGranuleRows rows by kGranuleWords half-words, whether it has no
// visible key, some or only visible keys; and for each band of granules the keys that any of its rows sees. A block
// writes kGranules adjacent granules of a band.
#pragma once

#include "attn/helper_params.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

namespace mask_writing {

constexpr int kGranuleRows = 64;
constexpr int kGranuleWords = 4;  // of 16 keys
constexpr int kGranules = 4;      // of a block
constexpr int kWords = kGranules * kGranuleWords;
constexpr int kThreads = 256;
constexpr int kStep = kThreads / kWords;  // rows that a block takes at once
constexpr int kPasses = kGranuleRows / kStep;
constexpr int kSharedBytes = kThreads * (sizeof(unsigned short) + 1);

enum State { kDead = 0, kPartial = 1, kFull = 2 };

// Where in the mask a block writes: batch entry, head, first row and first half-word.
struct Start {
  int batch, head, row, word;
};
DEVICE Start start_of(const WrittenMask& p, int block) {
  const int columns = (p.words + kWords - 1) / kWords;
  const int bands = (p.rows + kGranuleRows - 1) / kGranuleRows;
  const int plane = block / columns / bands;
  return {plane / p.nheads, plane % p.nheads, block / columns % bands * kGranuleRows, block % columns * kWords};
}

// The bits of a half-word that are keys: none behind the last key.
DEVICE unsigned keys_of(const WrittenMask& p, int word) {
  const int left = p.keys - word * 16;
  return left >= 16 ? 0xffffu : left > 0 ? (1u << left) - 1 : 0;
}

// half_word(batch, head, row, word): the 16 bits there. Bits behind the last key are ignored. shared: kSharedBytes.
template <class HalfWord>
DEVICE void write(const WrittenMask& p, const HalfWord& half_word, unsigned char* shared) {
  unsigned short* const words = reinterpret_cast<unsigned short*>(shared);
  unsigned char* const flags = shared + kThreads * sizeof(unsigned short);
  const int thread = target::thread_index();
  const Start start = start_of(p, target::block_index());
  const int64 plane = int64(start.batch) * p.nheads + start.head;
  const int word = start.word + thread % kWords;
  const int first_row = start.row + thread / kWords;
  unsigned any = 0;
  bool all = true;
  if (word < p.words) {
    const unsigned keys = keys_of(p, word);
    unsigned found[kPasses];  // all loads are in flight before the first store
    UNROLL for (int pass = 0; pass < kPasses; pass++) {
      const int row = first_row + pass * kStep;
      found[pass] = row < p.rows && keys != 0 ? half_word(start.batch, start.head, row, word) & keys : 0;
    }
    UNROLL for (int pass = 0; pass < kPasses; pass++) {
      const int row = first_row + pass * kStep;
      if (row >= p.rows) break;
      p.bits[(plane * p.rows + row) * p.words + word] = static_cast<unsigned short>(found[pass]);
      any |= found[pass];
      all = all && found[pass] == keys;
    }
  }
  words[thread] = static_cast<unsigned short>(any);
  flags[thread] = static_cast<unsigned char>((any != 0) | all << 1);
  target::block_sync();
  const int64 bands = (p.rows + kGranuleRows - 1) / kGranuleRows;
  const int64 band = plane * bands + start.row / kGranuleRows;
  if (thread < kWords && word < p.words) {
    for (int row = 1; row < kStep; row++) any |= words[row * kWords + thread];
    p.band_keys[band * p.words + word] = static_cast<unsigned short>(any);
  }
  const int granule = start.word / kGranuleWords + thread;
  if (thread >= kGranules || granule * kGranuleWords >= p.words) return;
  bool granule_any = false;
  bool granule_all = true;
  for (int row = 0; row < kStep; row++) {
    for (int n = 0; n < kGranuleWords; n++) {
      const unsigned flag = flags[row * kWords + thread * kGranuleWords + n];
      granule_any = granule_any || (flag & 1) != 0;
      granule_all = granule_all && (flag & 2) != 0;
    }
  }
  p.map[band * (p.words / kGranuleWords) + granule] = static_cast<unsigned char>(!granule_any  ? kDead
                                                                                 : granule_all ? kFull
                                                                                               : kPartial);
}

}  // namespace mask_writing
