// Which keys of which query tile come in which part of a line, where blocks share keys however long sequences are.
//
// The key tiles of all query tiles form a line: of one sequence after the other, of its heads one after the other. It
// is cut into equal parts. A part begins in one query tile and may end in another: of each it holds a segment. Segments
// of one query tile are in parts that follow each other, and are merged in the order of keys. Lengths are read where
// the line is cut, so a batch whose lengths change on the GPU keeps its launch. (Stream-K, Osama et al. 2023, cuts sums
// of matrix products so.)
//
// Some heads stand abreast: each block of a part has one of them. They read the same rows at the same time, and heads
// of a row are neighbours in memory.
//
// The line is counted in units of some key tiles. Where the number of pieces of a query tile is given, a unit is a
// piece instead, and a part is one unit.
#pragma once

#include "attn/pages.cuh"
#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "attn/tiles.cuh"
#include "target/target.cuh"

// Some keys of a query tile.
struct Segment {
  int sequence, head, tile;  // head: the first one of the tile
  Span q, k;
  int units;     // of the query tile
  int from, to;  // those of the segment
  int start;     // where the query tile begins in the line

  DEVICE bool whole() const { return from == 0 && to == units; }
};

// kHeads: of a query tile. kUnit: key tiles of a unit.
template <bool kRagged, bool kPaged, class Visible, int kTileQ, int kTileK, int kHeads, int kUnit, int kThreads>
struct Line {
  using Tiles = KeyTiles<Visible, kTileQ, kTileK>;

  const ForwardParams& p;
  int ranks;     // of a sequence's query tiles, as many abreast in each
  int total;     // units: the host has seen that an int counts them
  int parts;     // as many as the line is cut into
  int at, end;   // what is left of this block's part
  int sequence;  // not behind the one of `at`
  int rank;      // likewise, of the sequence
  int start;     // where the line has it
  Span q, k;     // of the sequence
  int own;       // units of each of its ranks

  // sums: in shared memory, of kThreads numbers. All threads of the block come here.
  DEVICE Line(const ForwardParams& p, int* sums) : p(p), ranks(p.nheads_q / kHeads / p.splits.abreast) {
    const int chunk = (p.batch + kThreads - 1) / kThreads;
    int first = 0;
    total = start = 0;
    if constexpr (kRagged) {
      const int thread = target::thread_index();
      int sum = 0;
      for (int n = 0; n < chunk && thread * chunk + n < p.batch; n++) {
        enter(thread * chunk + n);
        sum += own;
      }
      sums[thread] = sum * ranks;
      target::block_sync();
      const int used = chunk > 0 ? (p.batch + chunk - 1) / chunk : 0;
      for (int n = 0; n < used; n++) total += sums[n];
      cut();
      for (; first + 1 < used && start + sums[first] <= at; first++) start += sums[first];
      first *= chunk;
    } else {
      enter(0);
      total = own * ranks * p.batch;
      cut();
      if (at < end) {
        first = at / (own * ranks);
        start = own * ranks * first;
      }
    }
    // Behind what comes before that sequence.
    sequence = first - 1;
    rank = ranks - 1;
    own = 0;
  }

  // The first segment of what is left. There must be some.
  DEVICE Segment next() {
    while (at - start >= own) {
      start += own;
      if (++rank < ranks) continue;
      rank = 0;
      enter(sequence + 1);
    }
    Segment segment;
    int rest = at - start;
    segment.sequence = sequence;
    segment.head = (rank * p.splits.abreast + target::block_index() % p.splits.abreast) * kHeads;
    segment.q = q;
    segment.k = k;
    segment.tile = 0;
    segment.units = units(count(0));
    while (rest >= segment.units) {
      rest -= segment.units;
      segment.units = units(count(++segment.tile));
    }
    segment.start = at - rest;
    segment.from = rest;
    const int left = end - at + rest;
    segment.to = left < segment.units ? left : segment.units;
    at += segment.to - segment.from;
    return segment;
  }

  // Its key tiles, of all of its query tile.
  DEVICE TileSpan tiles(const Segment& segment, const TileSpan& all) const {
    const int tiles = all.count();
    if (p.splits.count > 0) {
      return {all.begin + static_cast<int>(int64(tiles) * segment.from / segment.units),
              all.begin + static_cast<int>(int64(tiles) * segment.to / segment.units)};
    }
    const int to = segment.to * kUnit;
    return {all.begin + segment.from * kUnit, all.begin + (to < tiles ? to : tiles)};
  }

  // The part of this block, where a part begins, and the part of a unit.
  DEVICE int part() const { return target::block_index() / p.splits.abreast; }
  DEVICE int begin_of(int part) const { return part * whole + static_cast<int>(int64(part) * rest / parts); }
  DEVICE int part_of(int unit) const {
    int part = static_cast<int>(static_cast<float>(unit) / static_cast<float>(total) * static_cast<float>(parts));
    part = part < parts ? part : parts - 1;
    while (begin_of(part) > unit) part--;
    while (begin_of(part + 1) <= unit) part++;
    return part;
  }

 private:
  int whole, rest;  // units of a part, and what that leaves

  DEVICE void cut() {
    const int blocks = static_cast<int>(target::grid_size()) / p.splits.abreast, least = p.splits.least;
    const int most = p.splits.count > 0 ? total : total / least + (total % least > 0);
    parts = p.splits.count > 0 || most < blocks ? most : blocks;
    at = end = 0;
    if (part() >= parts) return;
    whole = total / parts;
    rest = total % parts;
    at = begin_of(part());
    end = begin_of(part() + 1);
  }

  DEVICE void enter(int n) {
    sequence = n;
    if constexpr (kRagged) {
      q = span_of(p.q_side, n);
      k = span_of(p.k_side, n);
      if constexpr (kPaged) k.length = length_in_pages(p.pages, n, k.length);
    } else {
      q = {0, static_cast<int>(p.q_side.rows)};
      k = {0, static_cast<int>(p.k_side.rows)};
    }
    own = 0;
    for (int tile = 0; tile * kTileQ < q.length; tile++) own += units(count(tile));
  }
  // Key tiles of a query tile of the sequence.
  DEVICE int count(int tile) const {
    const int first = tile * kTileQ;
    const int last = first + kTileQ < q.length ? first + kTileQ - 1 : q.length - 1;
    return Tiles(Visible(p, q.length, k.length), first, last).count();
  }
  // A query tile without keys has a unit all the same, which writes its rows.
  DEVICE int units(int tiles) const {
    const int most = p.splits.count;
    const int n = most > 0 ? (tiles < most ? tiles : most) : (tiles + kUnit - 1) / kUnit;
    return n > 0 ? n : 1;
  }
};

// A query tile that several blocks share: where they leave what its rows come to, and which of them merges.
template <class BlockLine, class Partials>
struct SharedTile {
  const Splits& splits;
  int first, count;    // parts that it is in
  bool begins_inside;  // the first of them begins before it

  DEVICE SharedTile(const BlockLine& line, const Segment& segment)
      : splits(line.p.splits),
        first(segment.from == 0 ? line.part() : line.part_of(segment.start)),
        count((segment.to == segment.units ? line.part() : line.part_of(segment.start + segment.units - 1)) + 1 -
              first),
        begins_inside(line.begin_of(first) < segment.start) {}

  // A part shares at most two query tiles with others: the one in which it begins, and the one in which it ends.
  DEVICE Partials& part(int n) const {
    const int64 slots = splits.count > 0 ? 1 : 2;
    return static_cast<Partials*>(splits.partials)[block(n) * slots + (n == 0 && begins_inside)];
  }
  DEVICE Partials& own() const { return part(target::block_index() / splits.abreast - first); }

  // One thread of a block says that the block's own part is there. Whether all others are.
  DEVICE bool arrive() const {
    unsigned* const arrived = splits.arrived + block(0);
    const bool last = target::fetch_add(arrived, 1u) + 1 == static_cast<unsigned>(count);
    if (last) *arrived = 0;  // for the next launch
    return last;
  }

 private:
  // The one that has the n-th part, of those abreast of this block the same.
  DEVICE int64 block(int n) const { return int64(first + n) * splits.abreast + target::block_index() % splits.abreast; }
};
