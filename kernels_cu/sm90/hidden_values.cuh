// Values of keys that a mask hides from all queries of a head: they become zeros before a product reads them, since the
// probabilities' zeros do not hide a NaN.
//
// Every consumer does so for itself: what another one writes meanwhile is the same.
#pragma once

#include "attn/mask_bits.cuh"
#include "sm90/forward_block.cuh"

namespace forward {

constexpr int kCleaned = 8;  // the named barrier kCleaned + c: consumer c's values are clean

DEVICE void clear_value(SharedMemory& s, int slot, int row) {
  UNROLL for (int block = 0; block < kBlocksV; block++) {
    unsigned char* const first = s.values[slot] + block * kNextBlock + row / 8 * kNextValues + row % 8 * 128;
    Chunk<16>* const at = reinterpret_cast<Chunk<16>*>(first);
    UNROLL for (int n = 0; n < 8; n++) at[n] = {0, 0, 0, 0};
  }
}
// To a product of this consumer, which comes next.
DEVICE void values_are_clean(int consumer) {
  ptx::fence_copies();
  ptx::barrier_sync(kCleaned + consumer, kWarpgroup);
}

template <bool kMasked>
struct HiddenValues {
  template <class Keys>
  DEVICE void load(const BlockMask&, int, int, const Keys&, int) {}
  DEVICE void clear(SharedMemory&, int, int) const {}
};
template <>
struct HiddenValues<true> {
  static_assert(kTileK <= kWarpgroup, "a thread has one key");

  bool any;  // of the tile
  bool own;  // of this thread

  // Of key tile n, beside its product.
  template <class Keys>
  DEVICE void load(const BlockMask& mask, int sequence, int head, const Keys& keys, int n) {
    any = own = false;
    if (!keys.masked(n)) return;
    const int row = target::thread_index() % kWarpgroup;
    const unsigned short* const words =
        mask.keys + sequence * mask.keys_batch + int64(group_of(head, mask.group)) * mask.words;
    const int first = keys.first_key(n) / 16;
    HalfWords<kKeyBlocks> seen;
    seen.load(words, first, mask.words);
    any = !seen.all();
    // Read once more: to choose among the others by the thread would put them into local memory.
    const int word = first + row / 16 < mask.words ? first + row / 16 : mask.words - 1;
    own = row < kTileK && (words[word] >> row % 16 & 1) == 0;
  }
  // Of the tile in the ring's slot, once it is full.
  DEVICE void clear(SharedMemory& s, int slot, int consumer) const {
    if (!any) return;
    if (own) clear_value(s, slot, target::thread_index() % kWarpgroup);
    values_are_clean(consumer);
  }
};

}  // namespace forward
