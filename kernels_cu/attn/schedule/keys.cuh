// Which key tile of which kv head and sequence comes at which index of the backward's schedule.
//
// Work begins in the order of its index, as for query tiles in attn/schedule/queries.cuh:
//   - sequences: the one with the most queries first (ragged batches);
//   - inside a sequence, kv heads in sections: as many as the L2 cache has room for, or more where so few would leave
//     SMs idle (rawattn/_kernels/portable/backward_sections.py);
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

template <bool kRagged, int kTileK, bool kAllUniform>
DEVICE KeyWorkTile find_key_work_tile(const BackwardParams& p, int64 index) {
  const ForwardParams& f = p.forward;
  KeyWorkTile work;
  find_sequence<kRagged, true, kTileK>(f, OrderOfWaves<kAllUniform>{f.order}, f.nheads_kv, index, work);
  const int tiles = (work.k.length + kTileK - 1) / kTileK;
  const HeadTile found =
      find_head(index, tiles, f.nheads_kv, f.nheads_kv, sections_of(f.nheads_kv, work.q.length, p.section_queries));
  work.kv_head = found.head;
  work.tile = found.tile;
  return work;
}

// A key tile, whose walk of query tiles several blocks may share, and the part of it that a block has.
struct KeyPart {
  KeyWorkTile work;
  int part, parts;
};

// Every key tile has p.parts blocks.
template <bool kRagged, int kTileK, bool kAllUniform>
DEVICE KeyPart find_key_part(const BackwardParams& p, int64 index) {
  return {find_key_work_tile<kRagged, kTileK, kAllUniform>(p, index / p.parts), static_cast<int>(index % p.parts),
          p.parts};
}

// Key tiles with sink tokens have p.parts blocks, since all queries see them besides their window. All other key tiles
// have one block. The parts of sink tiles other than their first come before all other work.
template <bool kRagged, int kTileK, bool kAllUniform>
DEVICE KeyPart find_part_of_sinks(const BackwardParams& p, int64 index) {
  const ForwardParams& f = p.forward;
  const int sink_tiles = p.sink_rows / kTileK, of_sequence = sink_tiles * f.nheads_kv;
  const int64 tiles = int64(f.batch) * of_sequence, others = tiles * (p.parts - 1);
  const bool first = index >= others;
  KeyPart found{find_key_work_tile<kRagged, kTileK, kAllUniform>(p, first ? index - others : 0), 0, 1};
  KeyWorkTile& work = found.work;
  if (!first) {
    found.part = 1 + static_cast<int>(index / tiles);
    const int rest = static_cast<int>(index % tiles);
    work.sequence = rest / of_sequence;
    work.kv_head = rest % of_sequence / sink_tiles;
    work.tile = rest % sink_tiles;
    if constexpr (kRagged) {
      work.q = span_of(f.q_side, work.sequence);
      work.k = span_of(f.k_side, work.sequence);
    }
    work.exists = work.tile * kTileK < work.k.length;
  }
  if (work.tile < sink_tiles) found.parts = p.parts;
  return found;
}
