// Makes the lists of the tiles that meet under a block mask (attn/listed_tiles.cuh), for the tiles of the kernel that
// reads the lists. Two tiles meet if the rule of visible keys lets them and their granules in the mask's map are not
// all dead. One wave makes one list.
//
// A list has the key tiles of a query tile, or with kOfKeys the query tiles of a key tile. With kOrdered, the wave that
// makes the last list of a head also orders the head's query tiles (portable/order_lists.cuh).
#include "attn/listed_tiles.cuh"
#include "attn/mask_writing.cuh"
#include "attn/pages.cuh"
#include "attn/helper_params.cuh"
#include "attn/sequence.cuh"
#include "attn/tiles.cuh"
#include "attn/visible.cuh"
#include "portable/order_lists.cuh"
#include "target/target.cuh"

namespace mask_tiles {

using namespace config;
using mask_writing::State;

constexpr int kWaves = kThreads / target::kWave;
constexpr int kGranuleKeys = mask_writing::kGranuleWords * 16;
constexpr int kTile = kOfKeys ? kTileK : kTileQ;
constexpr int kEntryInts = kOfKeys ? 2 : 1;
using Visible = VisibleKeys<kLeft, kRight, kTopLeft, kPositions>;
using Order = OrderLists<kTile>;
static_assert(!kOfKeys || !kOrdered, "query tiles are ordered");
static_assert(kSharedBytes == (kOrdered ? kWaves * Order::kSharedBytes : 0), "the host computes the same size");

// The most granules of `size` rows (or keys) that a tile of `tile` can touch, where tiles begin at multiples of `tile`.
constexpr int most_touched(int tile, int size) { return tile % size == 0 ? tile / size : (tile - 2) / size + 2; }

// The mask's map of one head of one sequence. A granule that a tile only touches counts as a whole.
struct Granules {
  const unsigned char* map;
  int64 pitch;
  int rows, keys;

  // The state of a tile: rows [first, last], keys [first_key, last_key]. All of its granules are loaded at once; where
  // there are fewer than the most, the last one is loaded several times.
  DEVICE State of(int first, int last, int first_key, int last_key) const {
    constexpr int kRows = mask_writing::kGranuleRows;
    bool any = false;
    bool all = true;
    UNROLL for (int m = 0; m < most_touched(kTileQ, kRows); m++) {
      UNROLL for (int n = 0; n < most_touched(kTileK, kGranuleKeys); n++) {
        const int row = min(min(first / kRows + m, last / kRows), rows - 1);
        const int key = min(min(first_key / kGranuleKeys + n, last_key / kGranuleKeys), keys - 1);
        const int state = map[row * pitch + key];
        any |= state != mask_writing::kDead;
        all &= state == mask_writing::kFull;
      }
    }
    return !any ? mask_writing::kDead : all ? mask_writing::kFull : mask_writing::kPartial;
  }
  DEVICE static int min(int x, int y) { return x < y ? x : y; }
};

DEVICE State state_of(const Granules& granules, const KeyTiles<Visible, kTileQ, kTileK>& tiles, int n) {
  return granules.of(tiles.first, tiles.last, tiles.first_key(n), tiles.first_key(n) + kTileK - 1);
}
DEVICE State state_of(const Granules& granules, const QueryTiles<Visible, kTileQ, kTileK>& tiles, int n) {
  const int first_key = tiles.key_tile * kTileK;
  return granules.of(tiles.first_row(n), tiles.first_row(n) + kTileQ - 1, first_key, first_key + kTileK - 1);
}

// Adds the live ones of `tiles` to a list that has `count` entries. Returns how many it then has, which may be more
// than its capacity: those beyond it are not written.
template <class Tiles>
DEVICE int add(int* list, int count, int capacity, int part, const Granules& granules, const Tiles& tiles, int lane) {
  constexpr int kAtOnce = 4;  // tiles of a lane whose granules are loaded together
  for (int base = tiles.begin + lane; base - lane < tiles.end; base += kAtOnce * target::kWave) {
    State states[kAtOnce];
    UNROLL for (int i = 0; i < kAtOnce; i++) {
      const int n = base + i * target::kWave;
      const State state = state_of(granules, tiles, n < tiles.end ? n : tiles.end - 1);
      states[i] = n < tiles.end ? state : mask_writing::kDead;
    }
    UNROLL for (int i = 0; i < kAtOnce; i++) {
      const bool live = states[i] != mask_writing::kDead;
      const LaneSums lanes(live, lane);
      const int at = count + lanes.before;
      if (live && at < capacity) {
        const int entry = tiles.tile(base + i * target::kWave) * 2 + int(states[i] == mask_writing::kPartial);
        if (kOfKeys) list[1 + at * kEntryInts] = part;
        list[at * kEntryInts + kEntryInts] = entry;
      }
      count += lanes.total;
    }
  }
  return count;
}

}  // namespace mask_tiles

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_mask_tiles(PARAMETER MaskTilesParams p) {
  using namespace mask_tiles;
  target::launch_dependents();
  target::wait_for_prior_kernels();
  const ForwardParams& f = p.forward;
  const TileLists& lists = f.block_mask.lists;
  const int lane = target::thread_index() % target::kWave;
  const int wave = target::thread_index() / target::kWave;
  const int64 index = int64(target::block_index()) * kWaves + wave;
  const int head = static_cast<int>(index % lists.nheads);
  const int64 sequence_tile = index / lists.nheads;
  if (sequence_tile / p.tiles >= p.sequences) return;
  const int sequence = static_cast<int>(sequence_tile / p.tiles);
  const Span q = span_of(f.q_side, sequence);
  Span k = span_of(f.k_side, sequence);
  if constexpr (kPaged) k.length = length_in_pages(f.pages, sequence, k.length);
  const Span& own = kOfKeys ? k : q;
  const Visible visible(f, sequence, q.length, k.length);
  // Lengths on the GPU are not trusted: there may be more tiles than the host expects.
  for (int64 tile = sequence_tile % p.tiles; tile * kTile < own.length; tile += p.tiles) {
    int* const list = list_of<kTile, kEntryInts>(lists, sequence, own, static_cast<int>(tile), head * lists.group);
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
  if constexpr (kOrdered) {
    SHARED_MEMORY(shared, kSharedBytes);
    target::wave_sync();
    unsigned* const listed = p.listed + int64(sequence) * lists.nheads + head;
    const bool last = lane == 0 && target::fetch_add_acq_rel(listed, 1) + 1 == static_cast<unsigned>(p.tiles);
    if (!target::wave_any(last)) return;
    target::wave_sync();
    if (lane == 0) *listed = 0;  // for the next launch
    const Order order{lists, sequence, head * lists.group, own};
    order(reinterpret_cast<unsigned*>(shared + wave * Order::kSharedBytes), lane);
  }
}
