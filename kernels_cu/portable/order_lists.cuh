// Orders the query tiles of a head by the lengths of their lists of key tiles, the longest first, so that no long one
// begins last. One wave does a counting sort: it counts the lists in each bucket of lengths, then gives each tile its
// rank. Tiles of one bucket come in any order.
//
// Lengths on the GPU may make sequences overlap, which no check prevents. The lists of such sequences overlap too, and
// may change between two reads. Their order is then arbitrary, but stays in its memory.
#pragma once

#include "attn/listed_tiles.cuh"
#include "target/target.cuh"

// Sums of one number of each lane: `before` sums those of the lanes before this one, `total` those of all lanes.
struct LaneSums {
  int before, total;

  DEVICE LaneSums(int own, int lane) : before(0), total(own) {
    for (int mask = 1; mask < target::kWave; mask *= 2) {
      const int other = static_cast<int>(target::shuffle_xor(static_cast<unsigned>(total), mask));
      if ((lane & mask) != 0) before += other;
      total += other;
    }
  }
};

// Orders the lists of one sequence and head, by one wave. kTile: rows of a query tile. Its longer loops are not
// unrolled: instructions are fetched for one wave alone, and fetching them takes longer than executing them.
template <int kTile>
struct OrderLists {
  static constexpr int kBuckets = 128, kCachedLengths = 256;  // buckets; lengths that are kept in shared memory
  static constexpr int kSharedBytes = (kBuckets + kCachedLengths) * sizeof(unsigned);

  const TileLists& lists;
  int sequence, head;
  const Span& span;

  // shared: kSharedBytes that the wave has to itself.
  DEVICE void operator()(unsigned* shared, int lane) const {
    unsigned* const buckets = shared;
    int* const cached = reinterpret_cast<int*>(shared + kBuckets);
    const int tiles = (span.length + kTile - 1) / kTile;
    const int* const lengths = list_of<kTile, 1>(lists, sequence, span, 0, head);
    const int64 next = lists.nheads * list_length<1>(lists);
    int* const order = order_of<kTile>(lists, sequence, span, 0, head);
    int longest = 0;
#pragma unroll 4
    for (int tile = lane; tile < tiles; tile += target::kWave) {
      const int own = lengths[tile * next];
      if (tile < kCachedLengths) cached[tile] = own;
      longest = own > longest ? own : longest;
    }
    for (int mask = 1; mask < target::kWave; mask *= 2) {
      const int other = static_cast<int>(target::shuffle_xor(static_cast<unsigned>(longest), mask));
      longest = other > longest ? other : longest;
    }
    const float each_bucket = float(kBuckets) / (longest + 1);
    const auto bucket_of = [&](int tile) {
      const int length = tile < kCachedLengths ? cached[tile] : lengths[tile * next];
      const int bucket = static_cast<int>((length < longest ? longest - length : 0) * each_bucket);
      return buckets + (bucket < kBuckets ? bucket : kBuckets - 1);
    };
    for (int n = lane; n < kBuckets; n += target::kWave) buckets[n] = 0;
    target::wave_sync();
#pragma unroll 1
    for (int tile = lane; tile < tiles; tile += target::kWave) target::fetch_add(bucket_of(tile), 1);
    target::wave_sync();
    constexpr int kEach = kBuckets / target::kWave;
    unsigned* const own = buckets + lane * kEach;
    int count = 0;
    UNROLL for (int n = 0; n < kEach; n++) count += static_cast<int>(own[n]);
    unsigned first = LaneSums(count, lane).before;
    UNROLL for (int n = 0; n < kEach; n++) {
      const unsigned here = own[n];
      own[n] = first;
      first += here;
    }
    target::wave_sync();
#pragma unroll 1
    for (int tile = lane; tile < tiles; tile += target::kWave) {
      const int rank = static_cast<int>(target::fetch_add(bucket_of(tile), 1));
      order[int64(rank < tiles ? rank : tiles - 1) * lists.nheads] = tile;
    }
  }
};
