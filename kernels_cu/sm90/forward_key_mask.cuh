// A mask of keys: one bool for each key of a sequence, the same for all query rows and heads. Hopper's forward reads
// the bools themselves, so no launch before it has to make bits and lists of tiles. When the producer has found work,
// another warp of its warpgroup reads the bools of that sequence and adds them to the work slot as bits. Key tiles past
// the last kept key are not loaded, except the first tile (key_tiles_of() in sm90/forward_work.cuh). Key tiles in
// front of the first kept key are loaded, but consumers pass over them unless there is a window on the left. The host
// chooses this for sequences of few keys (masks_keys() in rawattn/_kernels/sm90/forward.py).
#pragma once

#include "attn/mask_bits.cuh"
#include "ptx/ptx.cuh"
#include "sm90/forward_work.cuh"
#include "sm90/hidden_values.cuh"

namespace forward {

static_assert(!kKeyMask || !(kBlockMask || kStreamK || kRagged || kCluster > 1), "the host gives it to plain calls");
static_assert(!kKeyMask || kMostMaskedKeys <= 32 * target::kWave, "a lane has 32 keys");

// Reads the mask of a piece of work; called by a whole warp. Keys outside the mask's extent are not kept.
DEVICE void read_key_mask(const KeyMask& mask, KeptKeyBits& kept, const WorkTile& work, int lane) {
  constexpr int kAtOnce = 8, kWave = target::kWave;
  const unsigned char* const keep = mask.data + work.sequence * mask.batch;
  const int in_mask = mask.keys < kMostMaskedKeys ? mask.keys : kMostMaskedKeys;
  const int count = work.k.length < in_mask ? work.k.length : in_mask;
  // mine: the bits of keys 32 * lane and on. from_first: kMostMaskedKeys less the first kept key that this lane has
  // read, so that the maximum over all lanes is that of the first kept key. behind: the key after the last kept one
  // that it has read.
  unsigned mine = 0, from_first = 0, behind = 0;
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kAtOnce * kWave) {
    bool keeps[kAtOnce];
    const unsigned char* const own = keep + begin + lane;
    const int left = count - begin - lane;
    UNROLL for (int n = 0; n < kAtOnce; n++) keeps[n] = n * kWave < left && own[n * kWave] != 0;
    UNROLL for (int n = 0; n < kAtOnce; n++) {
      const unsigned word = ptx::ballot(keeps[n]);
      if (lane == begin / kWave + n) mine = word;
      const unsigned key = begin + n * kWave + lane;
      if (!keeps[n]) continue;
      behind = key + 1;
      if (from_first == 0) from_first = kMostMaskedKeys - key;
    }
  }
  kept.bits[lane] = mine;
  const int first = kMostMaskedKeys - static_cast<int>(target::wave_max(from_first));
  behind = target::wave_max(behind);
  if (lane == 0) {
    kept.first = first;
    kept.behind = static_cast<int>(behind);
  }
}

// Main loop of the warp that reads the masks of all work and does nothing else. It passes each piece of work on from
// the producer (work_found) to the consumers (work_full).
template <class Memory>
DEVICE void read_key_masks(const Sm90ForwardParams& p, Memory& s, int lane) {
  Ring<2> slot;
  for (bool exists = true; exists; slot.advance()) {
    ptx::mbarrier_wait(&s.work_found[slot.slot], slot.parity);
    auto& work = s.work[slot.slot];
    exists = work.exists;
    if (exists) read_key_mask(p.key_mask, work, work, lane);
    // Every lane arrives for its own word of the bits.
    ptx::mbarrier_arrive(&s.work_full[slot.slot]);
  }
}

// Which keys of a tile are kept. This is the counterpart of TileMaskBits (attn/mask_bits.cuh), which is for masks with
// rows.
struct KeptOfTile {
  bool partial;
  HalfWords<kKeyBlocks> kept;

  DEVICE void load(const KeptKeyBits& keys, int first_key) {
    kept.load(reinterpret_cast<const unsigned short*>(keys.bits), first_key / 16, kMostMaskedKeys / 16);
    partial = !kept.all();
  }
  DEVICE void hide(C (&s)[1][kKeyBlocks], float value, int lane) const {
    if (!partial) return;
    UNROLL for (int n = 0; n < kKeyBlocks; n++) {
      const unsigned own = kept.word(n) >> C::column(lane, 0);
      UNROLL for (int e = 0; e < C::kElements; e++) {
        if ((own >> C::column(0, e) & 1) == 0) s[0][n].x[e] = value;
      }
    }
  }
};

// Zeroes the values of keys that are not kept (sm90/hidden_values.cuh says why).
struct DroppedValues {
  static_assert(kTileK <= kWarpgroup, "a thread has one key");

  bool tile_has_dropped;  // whether some key of the tile is not kept
  bool key_is_dropped;    // whether this thread's key is not

  DEVICE void load(const KeptKeyBits& keys, const KeptOfTile& tile, int first_key) {
    const int row = target::thread_index() % kWarpgroup, key = first_key + row;
    tile_has_dropped = tile.partial;
    key_is_dropped = row < kTileK && (key >= kMostMaskedKeys || (keys.bits[key / 32] >> key % 32 & 1) == 0);
  }
  DEVICE void clear(SharedMemory& s, int slot, int consumer) const {
    if (!tile_has_dropped) return;
    if (key_is_dropped) clear_value(s, slot, target::thread_index() % kWarpgroup);
    publish_cleared_values(consumer);
  }
};

// The mask of a tile, for a consumer: a BlockMask or none, or a mask of keys (kOfKeys). load() runs beside the
// products, hide() masks the scores, and clear() zeroes the values that no query sees.
template <bool kOfKeys>
struct MaskOfTile {
  TileMaskBits<kBlockMask, C, 1, kKeyBlocks> seen;
  HiddenValues<kBlockMask> hidden;

  template <class OwnTiles>
  DEVICE void load(const ForwardParams& p, const Item& work, int head, const OwnTiles& tiles, int n, int first_row,
                   int lane) {
    seen.load(tiles, n, first_row, lane);
    hidden.load(p.block_mask, work.sequence, head, tiles, n);
  }
  template <class Hidden>
  DEVICE void hide(C (&s)[1][kKeyBlocks], int lane, const Hidden& bias_clearer) const {
    seen.hide(s, -target::infinity(), lane, bias_clearer);
  }
  DEVICE void clear(SharedMemory& s, int slot, int consumer) const { hidden.clear(s, slot, consumer); }
};
template <>
struct MaskOfTile<true> {
  KeptOfTile kept;
  DroppedValues dropped;

  template <class OwnTiles>
  DEVICE void load(const ForwardParams&, const KeptKeyBits& keys, int, const OwnTiles& tiles, int n, int, int) {
    kept.load(keys, tiles.first_key(n));
    dropped.load(keys, kept, tiles.first_key(n));
  }
  template <class Hidden>
  DEVICE void hide(C (&s)[1][kKeyBlocks], int lane, const Hidden&) const {
    kept.hide(s, -target::infinity(), lane);
  }
  DEVICE void clear(SharedMemory& s, int slot, int consumer) const { dropped.clear(s, slot, consumer); }
};

}  // namespace forward
