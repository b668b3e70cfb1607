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
  static constexpr int kRoom = kThreads / target::kWave + 2;

  const ForwardParams& p;
  int part;      // of this block, which is one of those abreast there
  int mate;      // which of them
  int ranks;     // of a sequence's query tiles, as many abreast in each
  int total;     // units: the host has seen that an int counts them
  int parts;     // as many as the line is cut into
  int at, end;   // what is left of this block's part
  int sequence;  // not behind the one of `at`
  int rank;      // likewise, of the sequence
  int start;     // where the line has it
  Span q, k;     // of the sequence
  int own;       // units of each of its ranks

  // room: in shared memory, of kRoom numbers. All threads of the block come here.
  DEVICE Line(const ForwardParams& p, int* room)
      : p(p),
        part(quotient(target::block_index(), p.splits.abreast)),
        mate(target::block_index() - part * p.splits.abreast),
        ranks(quotient(p.nheads_q / kHeads, p.splits.abreast)) {
    int first = 0;
    if (kRagged && p.batch > 1) {
      first = find(room);
    } else {
      enter(0);
      total = own * ranks * p.batch;
      start = 0;
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
    segment.head = (rank * p.splits.abreast + mate) * kHeads;
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

  // Where a part begins, and the part of a unit.
  DEVICE int begin_of(int part) const { return part * whole + (part < longer ? part : longer); }
  DEVICE int part_of(int unit) const {
    const int others = longer * (whole + 1);  // the first unit of a part that is not longer
    return unit < others ? quotient(unit, whole + 1) : longer + quotient(unit - others, whole);
  }

 private:
  int whole, longer;  // units of a part, of which the first `longer` ones have one more

  // Of numbers that are not negative it takes a third of the instructions.
  DEVICE static int quotient(int x, int y) { return static_cast<int>(static_cast<unsigned>(x) / unsigned(y)); }

  // A part for each block, unless too few units would come to one.
  DEVICE void cut() {
    const int blocks = quotient(static_cast<int>(target::grid_size()), p.splits.abreast), least = p.splits.least;
    parts = total;
    if (p.splits.count == 0) {
      const int most = quotient(total + least - 1, least);
      parts = most < blocks ? most : blocks;
    }
    at = end = 0;
    if (part >= parts) return;
    whole = quotient(total, parts);
    longer = total - whole * parts;
    at = begin_of(part);
    end = begin_of(part + 1);
  }

  // Cuts the line, and finds where it has this block's part: the first of some sequences, `start` being theirs. Each
  // thread has some. What comes before them is summed up among the lanes of a wave, then among waves.
  DEVICE int find(int* room) {
    const int thread = target::thread_index(), lane = thread % target::kWave, wave = thread / target::kWave;
    const int some = (p.batch + kThreads - 1) / kThreads;
    int units = 0;
    for (int n = thread * some; n < (thread + 1) * some && n < p.batch; n++) {
      enter(n);
      units += own * ranks;
    }
    unsigned before = 0, all = units;
    UNROLL for (int mask = 1; mask < target::kWave; mask *= 2) {
      const unsigned other = target::shuffle_xor(all, mask);
      if (lane & mask) before += other;
      all += other;
    }
    if (lane == 0) room[wave] = static_cast<int>(all);
    target::block_sync();
    total = 0;
    UNROLL for (int n = 0; n < kThreads / target::kWave; n++) {
      if (n == wave) before += total;
      total += room[n];
    }
    cut();
    const int from = static_cast<int>(before);
    int* const found = room + kThreads / target::kWave;
    if (from <= at && at - from < units) {  // one thread
      found[0] = thread * some;
      found[1] = from;
    }
    target::block_sync();
    start = found[1];
    return found[0];
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
template <class Partials>
struct SharedTile {
  Segment own;         // of this block
  int mate;            // which of those abreast
  int part;            // of this block
  int first, count;    // parts that it is in
  bool begins_inside;  // the first of them begins before it

  template <class BlockLine>
  DEVICE SharedTile(const BlockLine& line, const Segment& own)
      : own(own),
        mate(line.mate),
        part(line.part),
        first(own.from == 0 ? part : line.part_of(own.start)),
        count((own.to == own.units ? part : line.part_of(own.start + own.units - 1)) + 1 - first),
        begins_inside(line.begin_of(first) < own.start) {}

  // A part shares at most two query tiles with others: the one in which it begins, and the one in which it ends.
  DEVICE Partials& partials(const Splits& splits, int n) const {
    const int64 slots = splits.count > 0 ? 1 : 2;
    return static_cast<Partials*>(splits.partials)[block(splits, n) * slots + (n == 0 && begins_inside)];
  }
  DEVICE Partials& own_partials(const Splits& splits) const { return partials(splits, part - first); }

  // One thread of a block says that the block's own part is there, between two barriers. Whether all others are.
  DEVICE bool arrive(const Splits& splits) const {
    unsigned* const arrived = splits.arrived + block(splits, 0);
    const bool last = target::fetch_add_in_order(arrived, 1u) + 1 == static_cast<unsigned>(count);
    if (last) *arrived = 0;  // for the next launch
    return last;
  }

 private:
  // The one that has the n-th part, of those abreast of this block the same.
  DEVICE int64 block(const Splits& splits, int n) const { return int64(first + n) * splits.abreast + mate; }
};
