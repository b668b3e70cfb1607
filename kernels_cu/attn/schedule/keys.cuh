// Which key tile of which kv head and sequence comes at which index of the backward's schedule.
//
// As for query tiles in attn/schedule/queries.cuh, work is begun in the order of its index:
//   - sequences: the one with the most queries first (ragged batches);
//   - inside a sequence, kv heads in sections: as many as the L2 cache has room for, or more where so few would leave
//     multiprocessors idle (rawattn/_kernels/portable/backward_sections.py);
//   - inside a section, the first key tile first (under a causal mask the most queries see it), its heads side by side.
#pragma once

#include "attn/params.cuh"
#include "attn/schedule/order.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

struct KeyWorkTile {
  bool exists;
  int sequence, kv_head, tile;
  Span q, k;
};

template <bool kRagged, int kTileK>
DEVICE KeyWorkTile find_key_work_tile(const BackwardParams& p, int64 index) {
  const ForwardParams& f = p.forward;
  KeyWorkTile work;
  find_sequence<kRagged, kTileK>(f, f.k_side, f.nheads_kv, index, work);
  const int tiles = (work.k.length + kTileK - 1) / kTileK;
  const HeadTile found = find_head(index, tiles, f.nheads_kv, 1, work.q.length, p.section_queries);
  work.kv_head = found.head;
  work.tile = found.tile;
  return work;
}
