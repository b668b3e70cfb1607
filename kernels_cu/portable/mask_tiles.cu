// Lists of the tiles that meet (attn/listed_tiles.cuh) of a kernel's own tiles: those that the rule of visible keys
// lets meet and whose granules in the mask's map are not all dead. One wave makes a list.
//
// With kOfKeys the lists are those of key tiles.
#include "attn/listed_tiles.cuh"
#include "attn/mask_packing.cuh"
#include "attn/pages.cuh"
#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "attn/tiles.cuh"
#include "attn/visible.cuh"
#include "target/target.cuh"

namespace mask_tiles {

using namespace config;
using mask_packing::State;

constexpr int kWaves = kThreads / target::kWave;
constexpr int kGranuleKeys = mask_packing::kGranuleWords * 16;
constexpr int kTile = kOfKeys ? kTileK : kTileQ;
constexpr int kPair = kOfKeys ? 2 : 1;
using Visible = VisibleKeys<kLeft, kRight, kTopLeft>;

// Of one head of one sequence. A granule that a rectangle only touches counts as a whole.
struct Granules {
  const unsigned char* map;
  int64 pitch;
  int rows, keys;

  DEVICE State of(int first, int last, int first_key, int last_key) const {
    constexpr int kRows = mask_packing::kGranuleRows;
    bool any = false;
    bool all = true;
    for (int row = behind(first / kRows, rows); row <= behind(last / kRows, rows); row++) {
      for (int key = behind(first_key / kGranuleKeys, keys); key <= behind(last_key / kGranuleKeys, keys); key++) {
        const int state = map[row * pitch + key];
        any = any || state != mask_packing::kDead;
        all = all && state == mask_packing::kFull;
      }
    }
    return !any ? mask_packing::kDead : all ? mask_packing::kFull : mask_packing::kPartial;
  }
  DEVICE static int behind(int n, int count) { return n < count ? n : count - 1; }
};

// How many lanes before this one have something, and how many of all.
struct Count {
  int before, total;
};
DEVICE Count count_lanes(bool has, int lane) {
  Count count{0, has};
  for (int mask = 1; mask < target::kWave; mask *= 2) {
    const int other = static_cast<int>(target::shuffle_xor(static_cast<unsigned>(count.total), mask));
    if ((lane & mask) != 0) count.before += other;
    count.total += other;
  }
  return count;
}

DEVICE State state_of(const Granules& granules, const KeyTiles<Visible, kTileQ, kTileK>& tiles, int n) {
  return granules.of(tiles.first, tiles.last, tiles.first_key(n), tiles.first_key(n) + kTileK - 1);
}
DEVICE State state_of(const Granules& granules, const QueryTiles<Visible, kTileQ, kTileK>& tiles, int n) {
  const int first_key = tiles.key_tile * kTileK;
  return granules.of(tiles.first_row(n), tiles.first_row(n) + kTileQ - 1, first_key, first_key + kTileK - 1);
}

// Adds the live ones of `tiles` to a list that has `count` entries.
template <class Tiles>
DEVICE int add(int* list, int count, int capacity, int part, const Granules& granules, const Tiles& tiles, int lane) {
  for (int base = tiles.begin; base < tiles.end; base += target::kWave) {
    const int n = base + lane;
    const State state = n < tiles.end ? state_of(granules, tiles, n) : mask_packing::kDead;
    const bool live = state != mask_packing::kDead;
    const Count lanes = count_lanes(live, lane);
    const int at = count + lanes.before;
    if (live && at < capacity) {
      const int entry = tiles.tile(n) * 2 + int(state == mask_packing::kPartial);
      if (kOfKeys) list[1 + at * kPair] = part;
      list[at * kPair + kPair] = entry;
    }
    count += lanes.total;
  }
  return count;
}

}  // namespace mask_tiles

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_mask_tiles(PARAMETER MaskTilesParams p) {
  using namespace mask_tiles;
  const ForwardParams& f = p.forward;
  const TileLists& lists = f.block_mask.lists;
  const int lane = target::thread_index() % target::kWave;
  const int64 index = int64(target::block_index()) * kWaves + target::thread_index() / target::kWave;
  const int head = static_cast<int>(index % lists.nheads);
  const int64 sequence_tile = index / lists.nheads;
  if (sequence_tile / p.tiles >= p.sequences) return;
  const int sequence = static_cast<int>(sequence_tile / p.tiles);
  const Span q = span_of(f.q_side, sequence);
  Span k = span_of(f.k_side, sequence);
  if constexpr (kPaged) k.length = length_in_pages(f.pages, sequence, k.length);
  const Span& own = kOfKeys ? k : q;
  const Visible visible(f, q.length, k.length);
  // Nobody has checked what a device says of lengths: there may be more tiles than the host expects.
  for (int64 tile = sequence_tile % p.tiles; tile * kTile < own.length; tile += p.tiles) {
    int* const list = list_of<kTile, kPair>(lists, sequence, own, static_cast<int>(tile), head * lists.group);
    int count = 0;
    for (int part = 0; part < p.parts; part++) {
      const unsigned char* const map = p.map + sequence * p.map_batch + (head * p.parts + part) / p.group * p.map_head;
      const Granules granules{map, p.map_row, p.map_rows, p.map_keys};
      const int first = static_cast<int>(tile) * kTile;
      if constexpr (kOfKeys) {
        const QueryTiles<Visible, kTileQ, kTileK> tiles(visible, static_cast<int>(tile), q.length);
        count = add(list, count, lists.capacity, part, granules, tiles, lane);
      } else {
        const int last = (q.length - first < kTileQ ? q.length : first + kTileQ) - 1;
        const KeyTiles<Visible, kTileQ, kTileK> tiles(visible, first, last);
        count = add(list, count, lists.capacity, part, granules, tiles, lane);
      }
    }
    if (lane == 0) list[0] = count < lists.capacity ? count : lists.capacity;
  }
}
