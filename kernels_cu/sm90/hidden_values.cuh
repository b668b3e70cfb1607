// Values of keys that a mask hides from all queries of a head become zeros in shared memory before P V reads them,
// since a probability of 0 does not hide a NaN.
//
// Every consumer of Hopper's forward does so for itself. Several may write to the same slot at once: all write zeros.
#pragma once

#include "attn/mask_bits.cuh"
#include "sm90/forward_work.cuh"

namespace forward {

// The named barrier kSharedWritten + c: the threads of consumer c meet when they have written to shared memory what its
// next product reads (zeros here, converted queries and slopes elsewhere).
constexpr int kSharedWritten = 8;

// Zeroes a row of the values in a slot.
DEVICE void clear_value(SharedMemory& s, int slot, int row) {
  UNROLL for (int block = 0; block < kBlocksV; block++) {
    unsigned char* const first = s.values[slot] + block * kBlockStride + row / 8 * kValueGroupStride + row % 8 * 128;
    Chunk<16>* const at = reinterpret_cast<Chunk<16>*>(first);
    UNROLL for (int n = 0; n < 8; n++) at[n] = {0, 0, 0, 0};
  }
}
// Makes cleared values visible to the next product of this consumer. Called by all of its threads.
DEVICE void publish_cleared_values(int consumer) {
  ptx::fence_async_proxy();
  ptx::barrier_sync(kSharedWritten + consumer, kWarpgroup);
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

  bool tile_has_hidden;  // whether the mask hides some key of the tile from all queries
  bool key_is_hidden;    // whether this thread's key is such a one

  // Finds such keys of tile n, while its Q K^T product runs.
  template <class Keys>
  DEVICE void load(const BlockMask& mask, int sequence, int head, const Keys& keys, int n) {
    tile_has_hidden = key_is_hidden = false;
    if (!keys.masked(n)) return;
    const int row = target::thread_index() % kWarpgroup;
    const unsigned short* const words =
        mask.keys + sequence * mask.keys_batch + int64(group_of(head, mask.group)) * mask.words;
    const int first = keys.first_key(n) / 16;
    HalfWords<kKeyBlocks> seen;
    seen.load(words, first, mask.words);
    tile_has_hidden = !seen.all();
    // Read from global memory once more: indexing `seen` by the thread would move it to local memory.
    const int word = first + row / 16 < mask.words ? first + row / 16 : mask.words - 1;
    key_is_hidden = row < kTileK && (words[word] >> row % 16 & 1) == 0;
  }
  // Clears the tile in a slot of the ring, once it is full.
  DEVICE void clear(SharedMemory& s, int slot, int consumer) const {
    if (!tile_has_hidden) return;
    if (key_is_hidden) clear_value(s, slot, target::thread_index() % kWarpgroup);
    publish_cleared_values(consumer);
  }
};

}  // namespace forward
