// The bits of a mask that hides keys one by one, and the test of a tile's elements against them.
//
// What lies behind the mask's extents is as its last row and the last half-words of a row are: that is how a mask with
// one row serves all rows, and no length makes a kernel read outside of the mask.
#pragma once

#include "attn/params.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

// kWords half-words next to each other, read by the widest accesses that their place allows: a tile's first half-word
// is a multiple of kWords.
template <int kWords>
struct HalfWords {
  static constexpr int kBytes = (2 * kWords & -(2 * kWords)) < 16 ? (2 * kWords & -(2 * kWords)) : 16;
  static constexpr int kChunk = kBytes / 2;

  union {
    Chunk<kBytes> chunks[kWords / kChunk];
    unsigned short words[kWords];
  };

  // row: of the mask, `count` half-words, a multiple of 8.
  DEVICE HalfWords(const unsigned short* row, int first, int count) {
    UNROLL for (int n = 0; n < kWords / kChunk; n++) {
      const int at = first + n * kChunk;
      chunks[n] = *reinterpret_cast<const Chunk<kBytes>*>(row + (at + kChunk <= count ? at : count - kChunk));
    }
  }
  DEVICE bool operator()(int key) const { return (words[key / 16] >> key % 16 & 1) != 0; }
};

// Of one head of one sequence.
struct MaskBits {
  const unsigned short* bits;
  int rows, words;

  DEVICE MaskBits(const BlockMask& mask, int sequence, int head)
      : bits(mask.bits + sequence * mask.batch + head / mask.group * mask.head), rows(mask.rows), words(mask.words) {}

  template <int kWords>
  DEVICE HalfWords<kWords> at(int row, int first_key) const {
    return {bits + int64(row < rows ? row : rows - 1) * words, first_key / 16, words};
  }
};

// Elements that the mask hides become `value`, whatever they are. Queries are rows.
template <class C, int kRowBlocks, int kKeyBlocks>
DEVICE void mask_by_bits(C (&s)[kRowBlocks][kKeyBlocks], float value, const MaskBits& bits, int first_row,
                         int first_key, int lane) {
  UNROLL for (int m = 0; m < kRowBlocks; m++) {
    UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
      const auto seen = bits.at<kKeyBlocks>(first_row + m * 16 + C::row(lane, slot), first_key);
      UNROLL for (int n = 0; n < kKeyBlocks; n++) {
        const unsigned own = seen.words[n] >> C::column(lane, 0);
        UNROLL for (int i = 0; i < C::kRun; i++) {
          const int e = C::element(slot, i);
          if ((own >> C::column(0, e) & 1) == 0) s[m][n].x[e] = value;
        }
      }
    }
  }
}

// The same where keys are rows and queries columns.
template <class C, int kKeyBlocks, int kQueryBlocks>
DEVICE void mask_by_bits_of_keys(C (&s)[kKeyBlocks][kQueryBlocks], float value, const MaskBits& bits, int first_key,
                                 int first_row, int lane) {
  UNROLL for (int n = 0; n < kQueryBlocks; n++) {
    UNROLL for (int i = 0; i < C::kRun; i++) {
      const auto seen = bits.at<kKeyBlocks>(first_row + n * 16 + C::column(lane, C::element(0, i)), first_key);
      UNROLL for (int m = 0; m < kKeyBlocks; m++) {
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
          if ((seen.words[m] >> C::row(lane, slot) & 1) == 0) s[m][n].x[C::element(slot, i)] = value;
        }
      }
    }
  }
}
