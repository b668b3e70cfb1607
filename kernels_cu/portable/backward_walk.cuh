// The walk of a block of the backward (portable/backward.cu): over the query tiles that see its key tile, in all query
// heads of the group.
#pragma once

#include "attn/tiles.cuh"
#include "target/target.cuh"

// One turn of the walk: a query tile of one of the group's heads. Blocks of neighbouring key tiles begin at different
// query tiles, so that they seldom add to the same dq at the same time. kPairs: heads are walked in pairs that share a
// bias; the second head of a pair takes each query tile right after the first.
struct Turn {
  int head, n, stage;  // head: in the group; n: the number of the query tile; stage: its slot in shared memory
  bool exists;

  DEVICE Turn next(const TileSpan& tiles, int start, int group) const {
    if constexpr (config::kPairs) {
      if (head % 2 == 0) return {head + 1, n, (stage + 1) % config::kStages, true};
      Turn after{head - 1, n + 1, (stage + 1) % config::kStages, true};
      if (after.n == tiles.end) after.n = tiles.begin;
      if (after.n == start) {
        after.head += 2;
        after.exists = after.head < group;
      }
      return after;
    }
    Turn after{head, n + 1, (stage + 1) % config::kStages, true};
    if (after.n == tiles.end) after.n = tiles.begin;
    if (after.n == start) after.exists = ++after.head < group;
    return after;
  }
};

// The walk of a block that has a key tile to itself. start(): the number of the query tile where it begins. `first`
// differs by one between neighbouring key tiles.
//
// next() takes the tiles as a TileSpan and is a member of Turn: written in another way, it cost 3 to 4% at D 64.
struct WholeWalk {
  template <class Queries>
  DEVICE static int start(const Queries& tiles, int first, int, int, int) {
    return tiles.count() > 0 ? tiles.begin + first % tiles.count() : 0;
  }
  template <class Queries>
  DEVICE static Turn first(const Queries& tiles, int start) {
    return {0, start, 0, tiles.count() > 0};
  }
  DEVICE static Turn next(const Turn& turn, const TileSpan& tiles, int start, int group) {
    return turn.next(tiles, start, group);
  }
};
// The walk of a block that shares a key tile: one part of the turns. Turns (with kPairs, pairs of turns) are numbered
// head by head and divided among the parts as evenly as can be.
//
// A turn is compared as one word, its head above its query tile. Its number, found by a division, took registers that
// ptxas does not have: it spilled 244 bytes at D 64, and the backward took 7 to 9% longer.
struct SharedWalk {
  static constexpr int kHeads = config::kPairs ? 2 : 1;
  // Bits of the word. The host lets blocks share key tiles where the 8 others suffice for the head.
  static constexpr int kTileBits = 24;
  // Words of turns: the part is [begin, end), and its walk begins with `start`.
  struct Start {
    unsigned begin, end, start;
  };

  template <class Queries>
  DEVICE static Start start(const Queries& tiles, int first, int group, int part, int parts) {
    const int64 all = int64(tiles.count()) * (group / kHeads);
    const int begin = static_cast<int>(all * part / parts), end = static_cast<int>(all * (part + 1) / parts);
    if (begin == end) return {0, 0, 0};
    return {of_number(tiles, begin), of_number(tiles, end), of_number(tiles, begin + first % (end - begin))};
  }
  template <class Queries>
  DEVICE static Turn first(const Queries&, const Start& start) {
    return {head_of(start.start), tile_of(start.start), 0, start.begin != start.end};
  }
  DEVICE static Turn next(const Turn& turn, const TileSpan& tiles, const Start& start, int) {
    const int stage = (turn.stage + 1) % config::kStages;
    if (config::kPairs && turn.head % 2 == 0) return {turn.head + 1, turn.n, stage, true};
    unsigned after =
        turn.n + 1 == tiles.end ? word(turn.head + 1, tiles.begin) : word(turn.head + 1 - kHeads, turn.n + 1);
    if (after == start.end) after = start.begin;
    return {head_of(after), tile_of(after), stage, after != start.start};
  }

 private:
  DEVICE static unsigned word(int head, int n) {
    return static_cast<unsigned>(head) << kTileBits | static_cast<unsigned>(n);
  }
  DEVICE static unsigned of_number(const TileSpan& tiles, int number) {
    return word(number / tiles.count() * kHeads, tiles.begin + number % tiles.count());
  }
  DEVICE static int head_of(unsigned word) { return static_cast<int>(word >> kTileBits); }
  DEVICE static int tile_of(unsigned word) { return static_cast<int>(word & ((1u << kTileBits) - 1)); }
};
// The walk under a block mask: over the list of the key tile, which has the query tiles of all heads of the group.
// Where blocks share the key tile, start() cuts the list to the block's part.
struct ListedWalk {
  template <class Queries>
  DEVICE static int start(Queries& tiles, int first, int, int part, int parts) {
    if constexpr (config::kSplit) tiles.take_part(part, parts);
    return tiles.count() > 0 ? tiles.begin + first % tiles.count() : 0;
  }
  template <class Queries>
  DEVICE static Turn first(const Queries& tiles, int start) {
    if (tiles.count() == 0) return {0, 0, 0, false};
    return {tiles.head(start), start, 0, true};
  }
  template <class Queries>
  DEVICE static Turn next(const Turn& turn, const Queries& tiles, int start, int) {
    Turn after{turn.head, turn.n + 1, (turn.stage + 1) % config::kStages, true};
    if (after.n == tiles.end) after.n = tiles.begin;
    after.head = tiles.head(after.n);
    after.exists = after.n != start;
    return after;
  }
};
