// The mask in decoding (attn/decode.cuh), where a tile has rows of several heads: row r is query `first + r / kHeads`
// of head `head + r % kHeads`. No list says which key tiles are dead, that is, hidden from all rows. Instead a wave
// looks up the bits of a tile two tiles before it loads the tile.
#pragma once

#include "attn/mask_bits.cuh"
#include "attn/params.cuh"
#include "target/target.cuh"

// kMasked: false where the kernel has no mask. C: the accumulator of Q K^T.
template <bool kMasked, class C, int kTileRows, int kTileK, int kHeads>
struct TileMask {
  struct TileBits {
    template <class Hidden>
    DEVICE void hide(C (&)[kTileRows / C::kRows][kTileK / 16], float, int, const Hidden&) const {}
    template <class Clear>
    DEVICE bool for_each_unseen_key(int, const Clear&) const {
      return false;
    }
  };

  TileMask() = default;
  DEVICE TileMask(const ForwardParams&, int, int, int, int, int) {}
  DEVICE void look_up(int) {}
  DEVICE bool dead() const { return false; }
  DEVICE TileBits seen(const ForwardParams&, int, int) const { return {}; }
};

template <class C, int kTileRows, int kTileK, int kHeads>
struct TileMask<true, C, kTileRows, kTileK, kHeads> {
  static constexpr int kRowBlocks = kTileRows / C::kRows, kKeyBlocks = kTileK / 16;
  static_assert(kKeyBlocks <= 2 && kTileRows <= target::kWave, "a row's bits are a word, and a lane has one row");
  static constexpr unsigned kAll = kKeyBlocks == 2 ? ~0u : 0xffffu;

  // The bits of all rows of a tile. Rows that are not real have those of the first row.
  struct TileBits : TileMaskBits<true, C, kRowBlocks, kKeyBlocks> {
    // Calls clear(key) for each key that no row sees; the lanes of the wave share these keys. Returns whether there are
    // any.
    template <class Clear>
    DEVICE bool for_each_unseen_key(int lane, const Clear& clear) const {
      if (!this->partial) return false;
      unsigned any = 0;
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) any |= this->rows[m][slot].pairs[0];
      }
      UNROLL for (int n = 1; n < target::kWave; n *= 2) any |= target::shuffle_xor(any, n);
      if ((any & kAll) == kAll) return false;
      for (int key = lane; key < kTileK; key += target::kWave) {
        if ((any >> key & 1) == 0) clear(key);
      }
      return true;
    }
  };

  const unsigned short* own;  // the mask's row for the row of the tile that is the lane's
  int words, sequence, head, first, rows;
  unsigned bits, next_bits;  // of that row: in the last tile but one that was looked up, and in the last

  TileMask() = default;
  // first: the first query. rows: how many are real.
  DEVICE TileMask(const ForwardParams& p, int sequence, int head, int first, int rows, int lane)
      : words(p.block_mask.words), sequence(sequence), head(head), first(first), rows(rows) {
    const int r = real(lane, rows), row = first + r / kHeads;
    const MaskBits mask(p.block_mask, sequence, head + r % kHeads);
    own = mask.bits + int64(row < mask.rows ? row : mask.rows - 1) * mask.words;
  }

  DEVICE void look_up(int first_key) {
    bits = next_bits;
    HalfWords<kKeyBlocks> found;
    found.load(own, first_key / 16, words);
    next_bits = found.pairs[0] & kAll;
  }
  // Whether no row sees any key of the last tile but one that was looked up.
  DEVICE bool dead() const { return !target::wave_any(bits != 0); }

  // The bits of any tile, for its elements. look_up() has read them before, so they are in a cache.
  DEVICE TileBits seen(const ForwardParams& p, int first_key, int lane) const {
    TileBits seen;
    bool all = true;
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const int r = real(m * C::kRows + C::row(lane, slot), rows);
        MaskBits(p.block_mask, sequence, head + r % kHeads).load(seen.rows[m][slot], first + r / kHeads, first_key);
        all = all && seen.rows[m][slot].all();
      }
    }
    seen.partial = target::wave_any(!all);
    return seen;
  }

 private:
  DEVICE static int real(int row, int rows) { return row < rows ? row : 0; }
};
