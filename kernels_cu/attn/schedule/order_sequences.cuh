// Orders the sequences of a ragged batch for kernels that take its tiles: those that are longest on the other side come
// first. For each sequence one thread finds its position, and how many tiles come before it, by comparing it with all
// others, without a sort or a scan.
#pragma once

#include "attn/params.cuh"
#include "attn/schedule/order.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

// For blocks of kThreads threads. Ordered: takes the order, as OrderInMemory does (attn/schedule/order.cuh).
template <int kThreads, class Ordered>
struct OrderSequences {
  struct Entry {
    int others, tiles;
  };
  static constexpr int kSharedBytes = kThreads * sizeof(Entry);

  const Side &tiled, &other;  // the side whose tiles are handed out, and the other one
  const int batch, tile;      // rows of a tile
  Ordered& ordered;

  DEVICE Entry entry_of(const Span& own, const Span& others) const {
    return {others.length, (own.length + tile - 1) / tile};
  }

  // All threads of a block call it. block: the number of the block among those of this order. shared: kSharedBytes.
  DEVICE void operator()(int block, unsigned char* shared) const {
    Entry* const all = reinterpret_cast<Entry*>(shared);
    const int thread = target::thread_index();
    const int sequence = block * kThreads + thread;
    Span own_tiled{0, 0}, own_other{0, 0};
    if (sequence < batch) {
      own_tiled = span_of(tiled, sequence);
      own_other = span_of(other, sequence);
    }
    const Entry mine = entry_of(own_tiled, own_other);
    int position = 0;
    int64 before = 0;
    for (int base = 0; base < batch; base += kThreads) {
      const int each = base + thread;
      if (each < batch) all[thread] = each == sequence ? mine : entry_of(span_of(tiled, each), span_of(other, each));
      target::block_sync();
      const int count = batch - base < kThreads ? batch - base : kThreads;
      for (int i = 0; i < count; i++) {
        const bool earlier = all[i].others > mine.others || (all[i].others == mine.others && base + i < sequence);
        if (earlier) {
          position++;
          before += all[i].tiles;
        }
      }
      target::block_sync();
    }
    if (sequence < batch) {
      // Unchecked integers may make sequences overlap, which then may have more tiles than an int counts.
      constexpr int64 kMost = 0x7fffffff;
      ordered.put(position, sequence, own_tiled, own_other, static_cast<int>(clamp(before, 0, kMost)));
      if (position == batch - 1) ordered.put_total(batch, static_cast<int>(clamp(before + mine.tiles, 0, kMost)));
    }
  }
};
