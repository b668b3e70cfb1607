// What a block of the decoding kernels (attn/decode.cuh) works on: a segment of its part of the line, the tiles of the
// segment that each wave has, and how they are found and loaded.
#pragma once

#include "attn/decode_tile.cuh"
#include "attn/pages.cuh"
#include "attn/params.cuh"
#include "attn/rows.cuh"
#include "attn/schedule/line.cuh"
#include "attn/tiles.cuh"
#include "attn/visible.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

namespace decode {

// Slots of a wave's ring.
DEVICE int next_slot(int slot) { return slot + 1 < kStages ? slot + 1 : 0; }
DEVICE int last_slot(int slot) { return slot > 0 ? slot - 1 : kStages - 1; }

// How many tiles each wave asks for in the L2 cache before earlier kernels are done: about 128 KiB for an SM.
// bytes: of one tile for each of its waves.
constexpr int tiles_ahead(int bytes) {
  constexpr int kBytes = 128 << 10;
  return bytes < kBytes ? (kBytes + bytes / 2) / bytes : 1;
}

// From how many turns on the tiles to ask for are spread over all turns.
constexpr int kManyTurns = 8;

// A segment, its tiles, and how they are loaded.
template <class Ring>
struct Work {
  Segment segment;
  int first;  // first query of the query tile
  KeyTiles<Visible, kTileQ, kTileK> key_tiles;
  TileSpan span;
  typename Ring::Source source;
  RowsMask mask;

  Work() = default;
  DEVICE Work(const ForwardParams& p, BlockLine& line, int lane)
      : segment(line.next()),
        first(segment.tile * kTileQ),
        key_tiles(Visible(p, segment.sequence, segment.q.length, segment.k.length), first, last()),
        span(line.tiles(segment, key_tiles)),
        source(p, segment, segment.kv_head),
        mask(p, segment.sequence, segment.head, first, segment.rows, lane) {}

  // The last query of the query tile.
  DEVICE int last() const { return kTileQ == 1 ? first : first + segment.rows / kHeads - 1; }
  // Turns of the waves, and the key tile of a wave in turn n.
  DEVICE int rounds() const { return (span.count() + kWaves - 1) / kWaves; }
  DEVICE int tile(int n, int wave) const { return span.begin + n * kWaves + wave; }

  // Starts to look up the wave's first tiles: their pages, and the mask of two.
  DEVICE void look_up_first(const Ring& ring, int wave, int lane) {
    if (tile(0, wave) < span.end) {
      UNROLL for (int n = 0; n < Ring::kLooksAhead; n++) look_up(ring, n, wave, lane);
      UNROLL for (int n = 0; n < 2; n++) mask.look_up(key_tiles.first_key(tile(n, wave)));
    }
    ring.commit_first_pages();
  }

  // Asks for kAhead of the wave's tiles in the L2 cache. Memory and the cache shall bring tiles at the same time once
  // loads begin. So those of a segment of many turns are spread evenly over these and over the waves, and of another
  // one every second tile is asked for, from the first one on in half of the waves and from the second one in others.
  DEVICE void prefetch(const Ring& ring, int wave, int lane) const {
    constexpr int kAhead = tiles_ahead(kWaves * Ring::kStageBytes * config::kBlocksPerSm);
    const bool is_long = rounds() >= kManyTurns;
    const int begin = wave % 2, all = (span.end - tile(begin, wave) + 2 * kWaves - 1) / (2 * kWaves);
    const int tiles = is_long ? kAhead : all;
    if (kBlockMask || tiles <= 0) return;  // which tiles a mask hides is not looked at here
    const int full_turns = rounds() - 1;   // the last one may lack tiles
    const auto first_key = [&](int n) {
      const int spread = (n * kWaves + wave + 1) * full_turns / (kAhead * kWaves + 1);
      return key_tiles.first_key(tile(is_long ? spread : begin + 2 * n, wave));
    };
    ring.template prefetch<kAhead>(source, first_key, tiles, lane);
  }

  // Starts to load the queries.
  DEVICE void load_queries(const ForwardParams& p, Element* queries, int wave, int lane) const {
    const auto q =
        rows_of_heads<kHeads, const Element>(p.q, p.q_strides, segment.sequence, segment.q, segment.head, first);
    CopyQ::load(queries, q, segment.rows, wave * target::kWave + lane);
    target::copy_async_commit();
  }

  // Starts to load the wave's first kStages - 1 tiles, which have been looked up, after the queries. slot: of the first
  // of these.
  DEVICE void load_first(const ForwardParams& p, Ring& ring, int slot, int wave, int lane) {
    ring.wait_for_first_pages();
#pragma unroll 1
    for (int n = 0; n < kStages - 1; n++, slot = next_slot(slot)) {
      if (tile(n, wave) < span.end) {
        load(p, ring, slot, n, wave, lane);
      } else {
        ring.commit();
      }
    }
  }

  // Waits for the tiles that load_first() has asked for.
  DEVICE void drop(Ring& ring, int slot, int wave) const {
    for (int n = 0; n < kStages - 1; n++, slot = next_slot(slot)) {
      if (tile(n, wave) < span.end && !is_empty(slot)) ring.wait(slot);
    }
    target::copy_async_wait();  // for what was looked up
  }

  // Starts to load the wave's tile of turn n, which has been looked up, and to look up later ones. The wave must have a
  // tile in this segment. Loads nothing behind the last one, nor a tile that the mask hides from all rows: its slot is
  // then marked as empty.
  DEVICE void load(const ForwardParams& p, Ring& ring, int slot, int n, int wave, int lane) {
    const int tile = this->tile(n, wave);
    if (tile < span.end) {
      const bool dead = mask.dead();
      if (kBlockMask) empty = dead ? empty | 1u << slot : empty & ~(1u << slot);
      if (!dead) load_rows(p, ring, slot, n, tile, lane);
    }
    // Behind the last tile too: if some turns did not look up, all would move what was looked up last to another
    // register, and wait for it.
    look_up(ring, n + Ring::kLooksAhead, wave, lane);
    mask.look_up(key_tiles.first_key(tile + 2 * kWaves));
    ring.commit();
  }
  DEVICE bool is_empty(int slot) const { return kBlockMask && (empty >> slot & 1) != 0; }

  // Calls `use` with a predicate that is true for the rows of a tile that some query row may see. The pages of other
  // rows may hold anything.
  template <class Use>
  DEVICE void real_rows(int tile, const Use& use) const {
    const int row = key_tiles.first_key(tile), rest = segment.k.length - row;
    if (!kTestsRange && rest >= kTileK) {
      use(AllReal{});
    } else {
      const VisibleRange<kTestsRange> range(key_tiles.visible, first, last());
      use(range.rows(row, rest));
    }
  }

 private:
  unsigned empty = 0;  // a bit for each slot

  DEVICE void load_rows(const ForwardParams& p, const Ring& ring, int slot, int n, int tile, int lane) {
    const int first_key = key_tiles.first_key(tile);
    if constexpr (Ring::kLoadsAllRows) {
      ring.load(p, source, slot, n, first_key, AllReal{}, lane);
    } else {
      real_rows(tile, [&](const auto& real) { ring.load(p, source, slot, n, first_key, real, lane); });
    }
  }

  // Starts to look up the pages of the wave's tile of turn n.
  DEVICE void look_up(const Ring& ring, int n, int wave, int lane) {
    const int tile = this->tile(n, wave);
    ring.look_up(source, n, key_tiles.first_key(tile), tile < span.end, lane);
  }

  // Whether rows are tested for more than the sequence's end. Without a left limit, and without a right limit from a
  // top-left diagonal, all pages that are read belong to the sequence.
  static constexpr bool kTestsRange = kPaged && (kLeft || (kRight && kTopLeft));
};

}  // namespace decode
