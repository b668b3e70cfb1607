// The walk of a key tile's block of the backward: over the query tiles that see its keys, of all heads of the group.
#pragma once

#include "attn/tiles.cuh"
#include "target/target.cuh"

// One turn of the walk: a query tile of one of the group's heads. Blocks of neighbouring key tiles begin at different
// query tiles, so that they seldom add to the same dq at the same time. kPairs: of two heads that share a bias the
// second one has each query tile right after the first.
struct Turn {
  int head, n, stage;  // n: the number of the query tile
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
// The tiles are a TileSpan here, and `next` a member: written in another way, the same walk cost 3 to 4% at D 64.
template <bool kListed>
struct Walk {
  template <class Queries>
  DEVICE static Turn first(const Queries& tiles, int start) {
    return {0, start, 0, tiles.count() > 0};
  }
  DEVICE static Turn next(const Turn& turn, const TileSpan& tiles, int start, int group) {
    return turn.next(tiles, start, group);
  }
};
// Of a mask's lists, which have the tiles of all heads.
template <>
struct Walk<true> {
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
