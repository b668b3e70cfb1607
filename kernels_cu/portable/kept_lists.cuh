// Makes the lists of the tiles that meet (attn/listed_tiles.cuh) for a call on gathered keys (portable/kept_setup.cu).
// A list of kept keys ascends, so the first and the last key of a tile tell which rows may see any of it, and which see
// all; the mask's bits are not needed. One wave makes one list of tiles.
#pragma once

#include "portable/kept_mask.cuh"
#include "portable/order_lists.cuh"

namespace kept_lists {

constexpr int kWaves = config::kThreads / target::kWave;

enum State { kDead = 0, kPartial = 1, kFull = 2 };

// The state of a pair of a query tile and a key tile.
DEVICE State state_of(const KeptListsParams& p, const KeptList& kept, const KeptLimits& limits, int tile_q,
                      int tile_k) {
  const int row = tile_q * p.tile_q, entry = tile_k * p.tile_k;
  const int last_row = (limits.rows - row < p.tile_q ? limits.rows : row + p.tile_q) - 1;
  const int last_entry = (kept.count - entry < p.tile_k ? kept.count : entry + p.tile_k) - 1;
  const int least = kept.key(entry);
  // Behind an entry that is no key, no entry is a key.
  if (least < 0) return kDead;
  const int last_key = kept.key(last_entry);
  const int most = last_key < 0 ? kept.rows - 1 : last_key;
  if (KeptRange::union_of_rows(limits, row, last_row).has_none(least, most)) return kDead;
  const bool all = last_key >= 0 && KeptRange::intersection_of_rows(limits, row, last_row).has_each(least, most);
  return all ? kFull : kPartial;
}

DEVICE void make(const KeptListsParams& p, const KeptKeys& keys, const KeptLimits& limits, int block) {
  const TileLists& lists = p.lists;
  const int lane = target::thread_index() % target::kWave;
  const int64 index = int64(block) * kWaves + target::thread_index() / target::kWave;
  const int head = static_cast<int>(index % lists.nheads);
  const int64 sequence_tile = index / lists.nheads;
  const int sequence = static_cast<int>(sequence_tile / p.tiles);
  if (sequence >= p.sequences) return;
  const int tile = static_cast<int>(sequence_tile % p.tiles);
  const KeptList kept(keys, sequence, head);
  const bool of_keys = p.of_keys != 0;
  const int pair = of_keys ? 2 : 1;
  const int64 first_list = sequence * lists.sequence;
  int* const list = lists.data + ((first_list + tile) * lists.nheads + head) * (1 + int64(lists.capacity) * pair);
  int count = 0;
  for (int part = 0; part < p.parts; part++) {
    for (int base = lane; base - lane < p.others; base += target::kWave) {
      State state = kDead;
      if (base < p.others) {
        state = of_keys ? state_of(p, kept, limits, base, tile) : state_of(p, kept, limits, tile, base);
      }
      const bool live = state != kDead;
      const LaneSums lanes(live, lane);
      const int at = count + lanes.before;
      if (live) {
        if (of_keys) list[1 + at * pair] = part;
        list[at * pair + pair] = base * 2 + int(state == kPartial);
      }
      count += lanes.total;
    }
  }
  if (lane != 0) return;
  list[0] = count;
  // The last query tiles come first: under a causal limit their rows see the most keys.
  if (lists.order != nullptr) lists.order[(first_list + p.tiles - 1 - tile) * lists.nheads + head] = tile;
}

}  // namespace kept_lists
