// Pages of float8 in Hopper's forward. Tiles are loaded in 8 bits to rings of their own. Two warps of the producer's
// warpgroup convert them to float16, into the rings that products read: one warp the keys, the other the values.
//
// Products are in float16, since one instruction converts two float8 to it. Queries in bfloat16 are converted to
// float16 too, in place (attn/stored_keys.cuh).
#pragma once

#include "attn/stored_keys.cuh"
#include "sm90/forward_work.cuh"
#include "sm90/hidden_values.cuh"

namespace forward {

// Where tiles of keys and values are loaded to, and the barriers of those rings: the rings that products read, or
// (kStored) the rings of tiles in 8 bits.
template <bool kStored>
struct LandingOf {
  static constexpr int kSlots = kStages;

  template <class S>
  DEVICE static auto& keys(S& s) {
    return s.keys;
  }
  template <class S>
  DEVICE static auto& values(S& s) {
    return s.values;
  }
  template <class S>
  DEVICE static S& barriers(S& s) {
    return s;
  }
};
template <>
struct LandingOf<true> {
  static constexpr int kSlots = kStoredSlots;

  template <class S>
  DEVICE static auto& keys(S& s) {
    return s.boxes.stored_keys;
  }
  template <class S>
  DEVICE static auto& values(S& s) {
    return s.boxes.stored_values;
  }
  template <class S>
  DEVICE static auto& barriers(S& s) {
    return s.stored_barriers;
  }
};
using Landing = LandingOf<kFloat8>;

template <class S>
DEVICE void init_stored_barriers(S& s) {
  if constexpr (kFloat8) {
    auto& b = s.stored_barriers;
    for (int i = 0; i < kStoredSlots; i++) {
      ptx::mbarrier_init(&b.keys_full[i], kCopiesRows ? target::kWave : 1);
      ptx::mbarrier_init(&b.keys_empty[i], 1);
      ptx::mbarrier_init(&b.values_full[i], kCopiesRows ? target::kWave : 1);
      ptx::mbarrier_init(&b.values_empty[i], 1);
    }
  }
}

// Converts a tile of kBlocks blocks of 64 columns. Called by all lanes of a warp.
//
// A lane converts 16 bytes into two pieces of 16 bytes. A warp converts 8 rows of a block at a time. Source and
// destination are in the 128-byte swizzle. Of the eight lanes that shared memory serves together, four have one row and
// four have another, whose numbers differ in bits 0 and 2. So neither loads nor stores have bank conflicts.
//
// While products run, loads from shared memory take long. So kAhead loads are in flight, and the load that replaces a
// piece is issued before the stores of that piece: the compiler would not move a load above a store.
template <int kBlocks>
DEVICE void convert_tile(unsigned char* tile, const unsigned char* stored) {
  constexpr int kGroups = kTileK / 8, kAll = kBlocks * kGroups;  // groups of 8 rows: of a block; of all blocks
  constexpr int kAhead = 4;
  // Read anew: otherwise what depends on the lane would be kept from tile to tile, and there are no registers for that.
  const int lane = target::reload_thread_index() % target::kWave;
  const int row = lane / 8 ^ lane / 4 % 2 * 5, chunk = lane % 4;
  const unsigned char* const from[2] = {stored + row * 128 + (chunk ^ row) * 16,
                                        stored + row * 128 + (chunk ^ row ^ 4) * 16};
  unsigned char* const to[2] = {tile + row * 128 + (2 * chunk ^ row) * 16,
                                tile + row * 128 + (2 * chunk ^ row ^ 1) * 16};
  const auto load = [&](int n) {
    const int block = n / kGroups, rows = block / 2 * kTileK + n % kGroups * 8;
    return *reinterpret_cast<const Chunk<16>*>(from[block % 2] + rows * 128);
  };
  Chunk<16> x[kAhead];
  UNROLL for (int n = 0; n < kAhead && n < kAll; n++) x[n] = load(n);
  UNROLL for (int n = 0; n < kAll; n++) {
    Chunk<16>& own = x[n % kAhead];
    const unsigned words[4] = {own.x, own.y, own.z, own.w};
    unsigned pairs[4][2];
    UNROLL for (int i = 0; i < 4; i++) target::float16_pairs(pairs[i], words[i]);
    if (n + kAhead < kAll) own = load(n + kAhead);
    const int rows = n / kGroups * kTileK + n % kGroups * 8;
    UNROLL for (int half = 0; half < 2; half++) {
      const auto &low = pairs[2 * half], &high = pairs[2 * half + 1];
      *reinterpret_cast<Chunk<16>*>(to[half] + rows * 128) = {low[0], low[1], high[0], high[1]};
    }
  }
}

// Main loop of the warp that converts keys, or values. It waits for work as consumers do.
template <bool kKeys, class S>
DEVICE void convert(const Sm90ForwardParams& p, S& s, int lane) {
  auto& stored = s.stored_barriers;
  ptx::Mbarrier* const stored_full = kKeys ? stored.keys_full : stored.values_full;
  ptx::Mbarrier* const stored_empty = kKeys ? stored.keys_empty : stored.values_empty;
  ptx::Mbarrier* const full = kKeys ? s.keys_full : s.values_full;
  ptx::Mbarrier* const empty = kKeys ? s.keys_empty : s.values_empty;
  Ring<kStoredSlots> from;
  Ring<kStages> to;
  Ring<2> slot;
  for (;;) {
    ptx::mbarrier_wait(&s.work_full[slot.slot], slot.parity);
    const Item& work = s.work[slot.slot];
    if (!work.exists) return;
    const TileSpan span = span_of_item(key_tiles_of(p.forward, work), work);
    target::wave_sync();  // all lanes have read the work slot
    if (lane == 0) ptx::mbarrier_arrive(&s.work_empty[slot.slot]);
    slot.advance();
#pragma unroll 1
    for (int n = span.begin; n < span.end; n++) {
      ptx::mbarrier_wait(&stored_full[from.slot], from.parity);
      ptx::mbarrier_wait(&empty[to.slot], to.parity ^ 1);
      if constexpr (kKeys) {
        convert_tile<kBlocksQk>(s.keys[to.slot], s.boxes.stored_keys[from.slot]);
      } else {
        convert_tile<kBlocksV>(s.values[to.slot], s.boxes.stored_values[from.slot]);
      }
      ptx::fence_async_proxy();  // orders the stores before products, and the loads before TMA fills the slot again
      target::wave_sync();
      // Consumers may write to values too, so for those every lane arrives for its own stores.
      if (!kKeys || lane == 0) ptx::mbarrier_arrive(&full[to.slot]);
      if (lane == 0) ptx::mbarrier_arrive(&stored_empty[from.slot]);
      from.advance();
      to.advance();
    }
  }
}

static_assert(!kConvertsQueries || kQuerySlots == 1, "they are in the first slot");

// Converts a consumer's queries to float16 in place, once they are loaded. Each warp divides its 16 rows by a power of
// two of its own, which is returned: the unit of the warp's products.
DEVICE float convert_queries(SharedMemory& s, int consumer) {
  // Read anew: otherwise addresses would be kept across the loop over key tiles.
  const int thread = target::reload_thread_index() - kWarpgroup, lane = thread % target::kWave;
  Element* const first = reinterpret_cast<Element*>(s.queries[0]) + thread / target::kWave * 16 * kColumns;
  const QueryTile<kBlocksQk, 16 * kColumns, kTileRows * kColumns> rows{first};
  const int exponent = rows.exponent(lane);
  target::wave_sync();  // all lanes have read what they need before any row changes
  rows.convert(exponent, lane, target::kWave);
  ptx::fence_async_proxy();
  ptx::barrier_sync(kSharedWritten + consumer, kWarpgroup);
  return target::float_of(static_cast<unsigned>(exponent) << 23);
}

}  // namespace forward
