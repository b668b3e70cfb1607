// Orders the sequences of a ragged batch for kernels that take its tiles: those that are longest on the other side come
// first. For each sequence one thread finds its position, and how many tiles come before it, by comparing it with all
// others, without a sort or a scan.
#pragma once

#include "attn/params.cuh"
#include "attn/schedule/order.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

// Where sequences lie on the two sides, as memory says: `tiled` is the side whose tiles are handed out.
struct LengthsInMemory {
  const Side &tiled, &other;

  DEVICE Span of_tiled(int sequence) const { return span_of(tiled, sequence); }
  DEVICE Span of_other(int sequence) const { return span_of(other, sequence); }
};

// kThreads threads work together: those of a block, or the lanes of a block's first wave (kOneWave). Lengths: says
// where sequences lie, as LengthsInMemory does. Ordered: takes the order, as OrderInMemory does
// (attn/schedule/order.cuh).
template <int kThreads, class Lengths, class Ordered, bool kOneWave = false>
struct OrderSequences {
  static_assert(!kOneWave || kThreads == target::kWave, "its lanes");
  struct Entry {
    int others, tiles;
  };
  static constexpr int kSharedBytes = kThreads * sizeof(Entry);

  const Lengths& lengths;
  const int batch, tile;  // rows of a tile
  Ordered& ordered;

  DEVICE Entry entry_of(const Span& own, const Span& others) const {
    return {others.length, (own.length + tile - 1) / tile};
  }

  // All of the threads call it. block: the number of the block among those of this order, or how often the wave has
  // called it before. shared: kSharedBytes.
  DEVICE void operator()(int block, unsigned char* shared) const {
    Entry* const all = reinterpret_cast<Entry*>(shared);
    const int thread = target::thread_index();
    const int sequence = block * kThreads + thread;
    Span own_tiled{0, 0}, own_other{0, 0};
    if (sequence < batch) {
      own_tiled = lengths.of_tiled(sequence);
      own_other = lengths.of_other(sequence);
    }
    const Entry mine = entry_of(own_tiled, own_other);
    int position = 0;
    int64 before = 0;
    for (int base = 0; base < batch; base += kThreads) {
      const int each = base + thread;
      if (each < batch)
        all[thread] = each == sequence ? mine : entry_of(lengths.of_tiled(each), lengths.of_other(each));
      sync();
      const int count = batch - base < kThreads ? batch - base : kThreads;
      for (int i = 0; i < count; i++) {
        const bool earlier = all[i].others > mine.others || (all[i].others == mine.others && base + i < sequence);
        if (earlier) {
          position++;
          before += all[i].tiles;
        }
      }
      sync();
    }
    if (sequence < batch) {
      // Unchecked integers may make sequences overlap, which then may have more tiles than an int counts.
      constexpr int64 kMost = 0x7fffffff;
      ordered.put(position, sequence, own_tiled, own_other, static_cast<int>(clamp(before, 0, kMost)));
      if (position == batch - 1) ordered.put_total(batch, static_cast<int>(clamp(before + mine.tiles, 0, kMost)));
    }
  }

 private:
  DEVICE static void sync() {
    if constexpr (kOneWave) {
      target::wave_sync();
    } else {
      target::block_sync();
    }
  }
};
