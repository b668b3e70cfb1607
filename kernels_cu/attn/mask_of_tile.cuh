// The bits of a mask for a tile whose rows are those of several heads: row r is one of query first + r / kHeads, in
// head head + r % kHeads. No list says which key tiles are dead: a wave looks a tile's bits up two tiles ahead of its
// load, as it does its page.
#pragma once

#include "attn/mask_bits.cuh"
#include "attn/params.cuh"
#include "target/target.cuh"

// kMasked: false where the kernel has no mask. C: of a product of queries and keys.
template <bool kMasked, class C, int kTileRows, int kTileK, int kHeads>
struct TileMask {
  struct Seen {
    template <class Hidden>
    DEVICE void hide(C (&)[kTileRows / 16][kTileK / 16], float, int, const Hidden&) const {}
    template <class Clear>
    DEVICE bool clear_hidden(int, const Clear&) const {
      return false;
    }
  };

  TileMask() = default;
  DEVICE TileMask(const ForwardParams&, int, int, int, int, int) {}
  DEVICE void look_up(int) {}
  DEVICE bool dead() const { return false; }
  DEVICE Seen seen(const ForwardParams&, int, int) const { return {}; }
};

template <class C, int kTileRows, int kTileK, int kHeads>
struct TileMask<true, C, kTileRows, kTileK, kHeads> {
  static constexpr int kRowBlocks = kTileRows / 16, kKeyBlocks = kTileK / 16;
  static_assert(kKeyBlocks <= 2 && kTileRows <= target::kWave, "a row's bits are a word, and a lane has one row");
  static constexpr unsigned kAll = kKeyBlocks == 2 ? ~0u : 0xffffu;

  // Of the tile's rows that are real; each of the others is as the first one.
  struct Seen : SeenKeys<true, C, kRowBlocks, kKeyBlocks> {
    // clear(key): of the keys that no row sees, in all lanes of the wave together. Returns whether there is one.
    template <class Clear>
    DEVICE bool clear_hidden(int lane, const Clear& clear) const {
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

  const unsigned short* own;  // of the lane's row
  int words, sequence, head, first, rows;
  unsigned bits, next_bits;  // of the last tile but one that was looked up, and of the last

  TileMask() = default;
  // first: query. rows: that are real.
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
  // Of the last tile but one that was looked up: whether no row sees any of its keys.
  DEVICE bool dead() const { return !target::wave_any(bits != 0); }

  // Of any tile. Its bits were read before, so they are near.
  DEVICE Seen seen(const ForwardParams& p, int first_key, int lane) const {
    Seen seen;
    bool all = true;
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const int r = real(m * 16 + C::row(lane, slot), rows);
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
