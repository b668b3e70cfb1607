// Pages of float8 in Hopper's forward. TMA leaves tiles as pages hold them, in rings of their own, and two
// warps of the producer's group convert them into the rings that products read: one the keys, one the values.
//
// Products are made in float16, which float8 becomes by one instruction for two elements. Queries in bfloat16 become
// float16 too, where they are (attn/stored_keys.cuh).
#pragma once

#include "attn/stored_keys.cuh"
#include "sm90/forward_block.cuh"
#include "sm90/hidden_values.cuh"

namespace forward {

// Where TMA leaves tiles: in the rings of products, or in those of tiles as they are stored.
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

// A tile of kBlocks blocks of 64 columns, by all lanes of a warp.
//
// A lane turns 16 bytes into two times 16. A warp has 8 rows of a block at a time. Both sides lie in the swizzle, and
// of the lanes that are served together four have one row and four another one, whose numbers differ in the bits 0 and
// 2: so neither loads nor stores meet in a bank.
//
// Beside products, shared memory takes long to answer. So kAhead pieces are on their way, and each one's successor is
// asked for in front of its stores, which the compiler would not pass.
template <int kBlocks>
DEVICE void convert_tile(unsigned char* tile, const unsigned char* stored) {
  constexpr int kGroups = kTileK / 8, kAll = kBlocks * kGroups;  // of rows, in a block and in all of them
  constexpr int kAhead = 4;
  // Read anew: what follows from it would be kept from tile to tile, and there are no registers for that.
  const int lane = target::thread_index_anew() % target::kWave;
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

// A warp that converts keys, or values. It learns of work as consumers do.
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
    target::wave_sync();  // all lanes have read the slot
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
      ptx::fence_copies();  // to products, and of what was read to TMA
      target::wave_sync();
      // Consumers may write to values too, so of those every lane says that its own are there.
      if (!kKeys || lane == 0) ptx::mbarrier_arrive(&full[to.slot]);
      if (lane == 0) ptx::mbarrier_arrive(&stored_empty[from.slot]);
      from.advance();
      to.advance();
    }
  }
}

static_assert(!kConvertsQueries || kQuerySlots == 1, "they are in the first slot");

// A consumer's queries, once they are there: each warp converts its 16 rows. Returns the unit of the warp's products.
DEVICE float convert_queries(SharedMemory& s, int consumer) {
  // Read anew, or addresses would be kept across the keys.
  const int thread = target::thread_index_anew() - kWarpgroup, lane = thread % target::kWave;
  Element* const first = reinterpret_cast<Element*>(s.queries[0]) + thread / target::kWave * 16 * kColumns;
  const QueryTile<kBlocksQk, 16 * kColumns, kTileRows * kColumns> rows{first};
  const int exponent = rows.exponent(lane);
  target::wave_sync();  // all have seen all of them
  rows.convert(exponent, lane, target::kWave);
  ptx::fence_copies();
  ptx::barrier_sync(kCleaned + consumer, kWarpgroup);
  return target::float_of(static_cast<unsigned>(exponent) << 23);
}

}  // namespace forward
