// Orders the sequences of a ragged batch for kernels that take its tiles: the longest on the other side first. One
// thread a sequence finds its position, and how many tiles come before it, by comparing itself with all others; no
// sort, no scan.
#pragma once

#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

// By blocks of kThreads.
template <int kThreads>
struct OrderSequences {
  struct Entry {
    int keys, tiles;
  };
  static constexpr int kSharedBytes = kThreads * sizeof(Entry);

  const ScheduleParams& p;
  const Side q_side, k_side;  // those of p, or copies of them with their integers elsewhere

  DEVICE Entry entry_of(int sequence) const {
    return {span_of(k_side, sequence).length, (span_of(q_side, sequence).length + p.tile_q - 1) / p.tile_q};
  }

  // block: among those of this order, all threads of it.
  DEVICE void operator()(int block, unsigned char* shared) const {
    Entry* const others = reinterpret_cast<Entry*>(shared);
    const int thread = target::thread_index();
    const int sequence = block * kThreads + thread;
    Entry mine{0, 0};
    if (sequence < p.batch) mine = entry_of(sequence);
    int position = 0;
    int64 before = 0;
    for (int base = 0; base < p.batch; base += kThreads) {
      if (base + thread < p.batch) others[thread] = entry_of(base + thread);
      target::block_sync();
      const int count = p.batch - base < kThreads ? p.batch - base : kThreads;
      for (int i = 0; i < count; i++) {
        const bool earlier = others[i].keys > mine.keys || (others[i].keys == mine.keys && base + i < sequence);
        if (earlier) {
          position++;
          before += others[i].tiles;
        }
      }
      target::block_sync();
    }
    if (sequence < p.batch) {
      p.order[position] = sequence;
      // Sequences that unchecked integers lay over each other can have more tiles than an int counts.
      constexpr int64 kMost = 0x7fffffff;
      p.first_tile[position] = static_cast<int>(clamp(before, 0, kMost));
      if (position == p.batch - 1) p.first_tile[p.batch] = static_cast<int>(clamp(before + mine.tiles, 0, kMost));
    }
  }
};
