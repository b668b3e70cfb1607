// Tiles of a head in the order of their lists: the longest first, so that none of those begins last. One wave counts
// how many lists there are of about a length, then gives each tile its rank. Tiles of about one length come in any
// order.
//
// Lists of sequences that lie over each other, which only a device can tell of, may change between two looks at them.
// Their order is any, within the memory that is theirs.
#pragma once

#include "attn/listed_tiles.cuh"
#include "target/target.cuh"

// What a lane's number and those of the lanes before it come to, and those of all.
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

// Of the lists of a sequence and head, tiles of kTile rows; by one wave. Its loops stay loops: each instruction is
// fetched for one wave alone, and what is fetched takes longer than what is done.
template <int kTile>
struct OrderLists {
  static constexpr int kLengths = 128, kKept = 256;
  static constexpr int kSharedBytes = (kLengths + kKept) * sizeof(unsigned);

  const TileLists& lists;
  int sequence, head;
  const Span& span;

  // shared: kSharedBytes of the wave's own.
  DEVICE void operator()(unsigned* shared, int lane) const {
    unsigned* const buckets = shared;
    int* const kept = reinterpret_cast<int*>(shared + kLengths);
    const int tiles = (span.length + kTile - 1) / kTile;
    const int* const lengths = list_of<kTile, 1>(lists, sequence, span, 0, head);
    const int64 next = lists.nheads * list_length<1>(lists);
    int* const order = order_of<kTile>(lists, sequence, span, 0, head);
    int longest = 0;
#pragma unroll 4
    for (int tile = lane; tile < tiles; tile += target::kWave) {
      const int own = lengths[tile * next];
      if (tile < kKept) kept[tile] = own;
      longest = own > longest ? own : longest;
    }
    for (int mask = 1; mask < target::kWave; mask *= 2) {
      const int other = static_cast<int>(target::shuffle_xor(static_cast<unsigned>(longest), mask));
      longest = other > longest ? other : longest;
    }
    const float each_bucket = float(kLengths) / (longest + 1);
    const auto bucket_of = [&](int tile) {
      const int length = tile < kKept ? kept[tile] : lengths[tile * next];
      const int bucket = static_cast<int>((length < longest ? longest - length : 0) * each_bucket);
      return buckets + (bucket < kLengths ? bucket : kLengths - 1);
    };
    for (int n = lane; n < kLengths; n += target::kWave) buckets[n] = 0;
    target::wave_sync();
#pragma unroll 1
    for (int tile = lane; tile < tiles; tile += target::kWave) target::fetch_add(bucket_of(tile), 1);
    target::wave_sync();
    constexpr int kEach = kLengths / target::kWave;
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
