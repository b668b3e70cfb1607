// The bits of a mask that hides single keys (BlockMask in attn/params.cuh), and how elements of a tile are masked by
// them.
//
// Beyond the mask's extents its last row, and the last half-words of each row, are repeated. So a mask of one row
// serves all rows, and no length makes a kernel read outside the mask.
#pragma once

#include "attn/params.cuh"
#include "attn/visit.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

// head / group, exact below 2^20 heads (the host refuses more). Each tile begins by computing it, and an integer
// division takes three times as long.
DEVICE int group_of(int head, int group) {
  return static_cast<int>((float(head) + 0.5f) * target::reciprocal(float(group)));
}

// kWords adjacent half-words, loaded by the widest accesses that their alignment allows: the first half-word of a tile
// is a multiple of kWords. A register holds two of them: the compiler would put an array of half-words into memory.
template <int kWords>
struct HalfWords {
  static constexpr int kBytes = (2 * kWords & -(2 * kWords)) < 16 ? (2 * kWords & -(2 * kWords)) : 16;
  static constexpr int kChunk = kBytes / 2;

  unsigned pairs[(kWords + 1) / 2];

  // row: a row of the mask, which has `count` half-words, a multiple of 8. first: the half-word to begin with.
  DEVICE void load(const unsigned short* row, int first, int count) {
    UNROLL for (int n = 0; n < kWords; n += kChunk) {
      const int at = first + n;
      const auto chunk = *reinterpret_cast<const Chunk<kBytes>*>(row + (at + kChunk <= count ? at : count - kChunk));
      unsigned* const to = pairs + n / 2;
      if constexpr (kBytes == 2) {
        to[0] = n % 2 ? to[0] & 0xffffu | unsigned(chunk.x) << 16 : chunk.x | 0xffff0000u;
      } else {
        to[0] = chunk.x;
        if constexpr (kBytes >= 8) to[1] = chunk.y;
        if constexpr (kBytes == 16) {
          to[2] = chunk.z;
          to[3] = chunk.w;
        }
      }
    }
  }
  // The half-word n in the low 16 bits.
  DEVICE unsigned word(int n) const { return n % 2 ? pairs[n / 2] >> 16 : pairs[n / 2]; }
  // Whether all keys are visible.
  DEVICE bool all() const {
    unsigned common = ~0u;
    UNROLL for (int n = 0; n < (kWords + 1) / 2; n++) common &= pairs[n];
    return common == ~0u;
  }
};

// The mask of one head of one sequence.
struct MaskBits {
  const unsigned short* bits;
  int rows, words;

  DEVICE MaskBits(const BlockMask& mask, int sequence, int head)
      : bits(mask.bits + sequence * mask.batch + group_of(head, mask.group) * mask.head),
        rows(mask.rows),
        words(mask.words) {}

  template <int kWords>
  DEVICE void load(HalfWords<kWords>& to, int row, int first_key) const {
    to.load(row_of(row), first_key / 16, words);
  }
  // Whether a row sees a key.
  DEVICE bool shows(int row, int key) const {
    const int word = key / 16;
    return (row_of(row)[word < words ? word : words - 1] >> key % 16 & 1) != 0;
  }

 private:
  DEVICE const unsigned short* row_of(int row) const { return bits + int64(row < rows ? row : rows - 1) * words; }
};

// Which keys of a tile a lane's rows see, for a tile whose rows are queries. The bits are loaded before the scores are
// computed, so that they are there by then. kMasked: false where the kernel has no mask.
template <bool kMasked, class C, int kRowBlocks, int kKeyBlocks>
struct TileMaskBits {
  template <class Keys>
  DEVICE void load(const Keys&, int, int, int) {}
  DEVICE void load_bits(const BlockMask&, int, int, int, int, int) {}
  template <class Hidden = NoCallback>
  DEVICE void hide(C (&)[kRowBlocks][kKeyBlocks], float, int, const Hidden& = Hidden{}) const {}
};
template <class C, int kRowBlocks, int kKeyBlocks>
struct TileMaskBits<true, C, kRowBlocks, kKeyBlocks> {
  bool partial;  // whether elements must be tested; else the bits are not loaded
  HalfWords<kKeyBlocks> rows[kRowBlocks][C::kSlots];

  // n: the number of the tile among `keys`.
  template <class Keys>
  DEVICE void load(const Keys& keys, int n, int first_row, int lane) {
    partial = keys.masked(n);
    if (partial) load_rows(keys.bits, first_row, keys.first_key(n), lane);
  }
  // For kernels without lists that say whether a tile is partial: it is taken to be.
  DEVICE void load_bits(const BlockMask& mask, int sequence, int head, int first_row, int first_key, int lane) {
    partial = true;
    load_rows(MaskBits(mask, sequence, head), first_row, first_key, lane);
  }
  DEVICE void load_rows(const MaskBits& bits, int first_row, int first_key, int lane) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        bits.load(rows[m][slot], first_row + m * C::kRows + C::row(lane, slot), first_key);
      }
    }
  }
  // Sets the elements that the mask hides to `value`, even NaN. hidden(m, n, e): called for each of them.
  template <class Hidden = NoCallback>
  DEVICE void hide(C (&s)[kRowBlocks][kKeyBlocks], float value, int lane, const Hidden& hidden = Hidden{}) const {
    if (!partial) return;
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        UNROLL for (int n = 0; n < kKeyBlocks; n++) {
          const unsigned seen = rows[m][slot].word(n) >> C::column(lane, 0);
          UNROLL for (int i = 0; i < C::kRun; i++) {
            const int e = C::element(slot, i);
            if ((seen >> C::column(0, e) & 1) != 0) continue;
            s[m][n].x[e] = value;
            hidden(m, n, e);
          }
        }
      }
    }
  }
};

// A predicate for the rows of a key tile: whether any query sees the row. The others are not read, so that a NaN in
// them reaches no result.
struct SeenKeyRows {
  const unsigned short* keys;  // BlockMask::keys; null: all rows are seen
  int64 head;                  // stride between the heads of the mask that share the keys
  int heads, words, first_key, valid;

  DEVICE bool operator()(int row) const {
    if (row >= valid) return false;
    if (keys == nullptr) return true;
    const int word = (first_key + row) / 16 < words ? (first_key + row) / 16 : words - 1;
    unsigned seen = 0;
    for (int n = 0; n < heads; n++) seen |= keys[n * head + word];
    return (seen >> row % 16 & 1) != 0;
  }
};

// The rows of a key tile to copy for query heads [head, head + group): the first `valid`, which the sequence has, and
// where kMasked of these only those that some query sees. partial: whether the mask hides any element of the tile.
template <bool kMasked>
DEVICE auto rows_to_copy(const BlockMask& mask, int sequence, int head, int group, int first_key, int valid,
                         bool partial) {
  if constexpr (kMasked) {
    const unsigned short* const keys =
        mask.keys + sequence * mask.keys_batch + int64(group_of(head, mask.group)) * mask.words;
    const int heads = group > mask.group ? group / mask.group : 1;
    return SeenKeyRows{partial ? keys : nullptr, mask.words, heads, mask.words, first_key, valid};
  } else {
    return valid;
  }
}
template <bool kMasked, class Keys>
DEVICE bool is_partial(const Keys& keys, int n) {
  if constexpr (kMasked) return keys.masked(n);
  return false;
}

// Sets the elements that the mask hides to `value`, in a tile whose rows are keys and whose columns are queries. n: the
// number of the tile among `queries`.
template <bool kMasked, class C, int kKeyBlocks, int kQueryBlocks, class Queries>
DEVICE void hide_by_bits(C (&s)[kKeyBlocks][kQueryBlocks], float value, const BlockMask& mask, int sequence, int head,
                         const Queries& queries, int n, int first_key, int first_row, int lane) {
  if constexpr (kMasked) {
    if (!queries.masked(n)) return;
    const MaskBits bits(mask, sequence, head);
    UNROLL for (int b = 0; b < kQueryBlocks; b++) {
      UNROLL for (int i = 0; i < C::kRun; i++) {
        HalfWords<kKeyBlocks> seen;
        bits.load(seen, first_row + b * 16 + C::column(lane, C::element(0, i)), first_key);
        UNROLL for (int m = 0; m < kKeyBlocks; m++) {
          UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
            if ((seen.word(m) >> C::row(lane, slot) & 1) == 0) s[m][b].x[C::element(slot, i)] = value;
          }
        }
      }
    }
  }
}
