// Which key tile of which kv head and sequence comes at which index of the backward's schedule.
//
// As for query tiles in attn/scheduler.cuh, work is begun in the order of its index:
//   - sequences: the one with the most queries first (ragged batches);
//   - inside a sequence, kv heads in sections whose queries, dout and dq fit the L2 cache together;
//   - inside a section, the first key tile first (under a causal mask the most queries see it), its heads side by side.
#pragma once

#include "attn/params.cuh"
#include "attn/scheduler.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

struct KeyWork {
  bool exists;
  int sequence, kv_head, tile;
  Span q, k;
};

template <bool kRagged, int kTileK>
DEVICE KeyWork find_key_work(const BackwardParams& p, int64 index) {
  const ForwardParams& f = p.forward;
  KeyWork work;
  if constexpr (kRagged) {
    const int tile = static_cast<int>(index / f.nheads_kv);
    work.exists = tile < f.first_tile[f.batch];
    if (!work.exists) return work;
    const int place = place_of(f.first_tile, f.batch, tile);
    index -= int64(f.first_tile[place]) * f.nheads_kv;
    work.sequence = f.order[place];
    work.q = span_of(f.q_side, work.sequence);
    work.k = span_of(f.k_side, work.sequence);
  } else {
    work.q = {0, static_cast<int>(f.q_side.rows)};
    work.k = {0, static_cast<int>(f.k_side.rows)};
    const int64 blocks = (f.k_side.rows + kTileK - 1) / kTileK * f.nheads_kv;
    work.sequence = static_cast<int>(index / blocks);
    work.exists = work.sequence < f.batch;
    index -= work.sequence * blocks;
  }
  const int tiles = (work.k.length + kTileK - 1) / kTileK;
  const int sections =
      static_cast<int>(clamp(int64(f.nheads_kv) * work.q.length / p.section_queries, 0, f.nheads_kv - 1)) + 1;
  const int section_heads = (f.nheads_kv + sections - 1) / sections;  // as even as can be
  const int section = static_cast<int>(index / (int64(tiles) * section_heads));
  index -= int64(section) * tiles * section_heads;
  const int first_head = section * section_heads;
  const int heads = first_head + section_heads <= f.nheads_kv ? section_heads : f.nheads_kv - first_head;
  work.tile = static_cast<int>(index / heads);
  work.kv_head = first_head + static_cast<int>(index % heads);
  return work;
}
