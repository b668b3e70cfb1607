// Which keys of which query tile come in which part of a line, where blocks share keys however long sequences are.
//
// The key tiles of all query tiles form a line: of one sequence after the other, of its heads one after the other. It
// is cut into equal parts, or of short sequences into those. A part begins in one query tile and may end in another: of
// each it holds a segment. Segments of one query tile are in parts that follow each other, and are merged in the order
// of keys. Lengths are read where the line is cut, so a batch whose lengths change on the GPU keeps its launch.
// (Stream-K, Osama et al. 2023, cuts sums of matrix products so.)
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
  int kv_head;
  int rows;  // of the tile, in all its heads
  Span q, k;
  int units;     // of the query tile
  int from, to;  // those of the segment
  int start;     // where the query tile begins in the line

  DEVICE bool whole() const { return from == 0 && to == units; }
};

// kPlain: lengths and pages are (attn/sequence.cuh). kHeads: of a query tile; kRest: those of a kv head are no multiple
// of it, and its last tile has fewer. kUnit: key tiles of a unit.
template <bool kRagged, bool kPaged, bool kPlain, class Visible, int kTileQ, int kTileK, int kHeads, bool kRest,
          int kUnit, int kThreads>
struct Line {
  using Tiles = KeyTiles<Visible, kTileQ, kTileK>;
  static constexpr int kSums = kThreads / target::kWave;

  // What threads tell each other of a line: units of waves, and a sequence, as below.
  struct Room {
    int sums[kSums], longest[kSums];
    int sequence, start, own;
    Span q, k;
  };

  const ForwardParams& p;
  int part;      // of this block, which is one of those abreast there
  int mate;      // which of them
  int total;     // units: the host has seen that an int counts them
  int parts;     // as many as the line is cut into
  int at, end;   // what is left of this block's part
  int sequence;  // not behind the one of `at`
  int rank;      // likewise, of the sequence
  int start;     // where the line has it
  Span q, k;     // of the sequence
  int own;       // units of each of its ranks

  // What the launch alone tells.
  DEVICE explicit Line(const ForwardParams& p)
      : p(p),
        part(quotient(target::block_index(), p.splits.abreast)),
        mate(target::block_index() - part * p.splits.abreast),
        rank(0),
        start(0) {}

  // Cuts it, from lengths that earlier kernels may have written. room: in shared memory. All threads of the block come
  // here.
  DEVICE void cut(Room& room) {
    if (kRagged && p.batch > 1) {
      find(room);
      return;
    }
    enter(0);
    const int each = own * p.splits.ranks;
    total = each * p.batch;
    share_out();
    if (kRagged && are_alone(own)) {
      take(part < p.splits.ranks, part);
      return;
    }
    // They are all alike.
    if (p.batch > 1 && at < end) sequence = quotient(at, each);
    start = each * sequence;
  }

  // The first segment of what is left. There must be some.
  DEVICE Segment next() {
    while (at - start >= own) {
      start += own;
      if (++rank < p.splits.ranks) continue;
      rank = 0;
      enter(sequence + 1);
    }
    Segment segment;
    int rest = at - start;
    segment.sequence = sequence;
    segment.q = q;
    segment.k = k;
    segment.tile = 0;
    segment.units = q.length <= kTileQ ? own : units(count(0));
    while (rest >= segment.units) {
      rest -= segment.units;
      segment.units = units(count(++segment.tile));
    }
    locate(segment);
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

  // Of numbers that are not negative it takes a third of the instructions.
  DEVICE static int quotient(int x, int y) { return static_cast<int>(static_cast<unsigned>(x) / unsigned(y)); }

  // Where a part begins, and the part of a unit. Longer ones lie between the others, so that parts of sequences that
  // are alike end where those do.
  DEVICE int begin_of(int part) const { return part * whole + quotient(part * longer, parts); }
  DEVICE int part_of(int unit) const {
    if (longer == 0) return quotient(unit, whole);
    int part = static_cast<int>(static_cast<float>(unit) * static_cast<float>(parts) / static_cast<float>(total));
    while (begin_of(part) > unit) part--;
    while (begin_of(part + 1) <= unit) part++;
    return part;
  }

 private:
  int whole, longer;  // units of a part, of which `longer` ones have one more

  // Its heads, and its rows.
  DEVICE void locate(Segment& segment) const {
    const int beside = rank * p.splits.abreast + mate, left = q.length - segment.tile * kTileQ;
    const int queries = left < kTileQ ? left : kTileQ;
    segment.kv_head = p.splits.of_group == 1 ? beside : quotient(beside, p.splits.of_group);
    if constexpr (kRest) {
      const int group = quotient(p.nheads_q, p.nheads_kv);
      const int before = (beside - segment.kv_head * p.splits.of_group) * kHeads;
      segment.head = segment.kv_head * group + before;
      segment.rows = queries * (group - before < kHeads ? group - before : kHeads);
    } else {
      segment.head = beside * kHeads;
      segment.rows = queries * kHeads;
    }
  }

  // Equal parts, one for each block. In ragged batches too few units may come to one: then there are fewer. But short
  // sequences have blocks of their own, if there are as many.
  DEVICE void share_out() {
    parts = total;
    if (p.splits.count == 0) {
      const int blocks = p.splits.blocks, least = kRagged ? p.splits.least : 1;
      int most = blocks;
      if (total < blocks * least) {
        most = kRagged ? quotient(total + least - 1, least) : total;
        // One without queries has no unit, and no part may be empty: its block would arrive nowhere.
        const int streams = p.batch * p.splits.ranks;
        if (most < streams) most = streams < total ? streams : total;
      }
      parts = most < blocks ? most : blocks;
    }
    whole = longer = at = end = 0;
    if (parts == 0) return;
    whole = quotient(total, parts);
    longer = total - whole * parts;
    if (part >= parts) return;
    const int before = quotient(part * longer, parts), rest = part * longer - before * parts;  // as in begin_of
    at = part * whole + before;
    end = at + whole + (rest + longer >= parts ? 1 : 0);
  }

  // Whether each sequence of a rank is rather a part of its own. A part takes the time of its units, beside that of the
  // memory for all units. To join what parts leave of a query tile takes as long as some units, of parts that end in
  // the midst of others longer; beside many units it is little (docs/notes/decode.md). longest: units of one, at most.
  DEVICE bool are_alone(int longest) const {
    constexpr int kMost = 16;
    const int streams = p.batch * p.splits.ranks;
    if (p.splits.count > 0 || longest > kMost || streams > p.splits.blocks || p.batch > kThreads) return false;
    // Of equal sequences, several parts each end where those do, but for few such numbers.
    const bool aligned = total == parts || (total == longest * streams && parts >= 2 * streams);
    const float join = aligned ? 1.5f : 5.0f, shared = static_cast<float>(whole + (longer > 0 ? 1 : 0));
    const float memory = static_cast<float>(total) * p.splits.per_busy, alone = static_cast<float>(longest);
    // alone^2 + memory^2 < (sqrt(shared^2 + memory^2) + join)^2
    const float root = fmaxf(shared, memory) + 0.4f * fminf(shared, memory);
    return alone * alone < shared * shared + join * (join + 2.0f * root);
  }
  // Such a part, if there is one, of this rank of the sequence that has been entered, which begins at `start`.
  DEVICE void take(bool exists, int own_rank) {
    at = end = 0;
    if (!exists) return;
    rank = own_rank;
    start += own * rank;
    at = start;
    end = at + own;
  }

  // Cuts the line, and enters the first of some sequences where it has this block's part. Each thread has some. What
  // comes before them is summed up among the lanes of a wave, then among waves.
  DEVICE void find(Room& room) {
    const int thread = target::thread_index(), lane = thread % target::kWave, wave = thread / target::kWave;
    const int some = (p.batch + kThreads - 1) / kThreads;
    int units = 0;
    unsigned longest = 0;  // units of a sequence
    const int behind = (thread + 1) * some;
    for (int n = (behind < p.batch ? behind : p.batch) - 1; n >= thread * some; n--) {
      enter(n);
      units += own * p.splits.ranks;
      longest = max_of(own, longest);
    }
    unsigned before = 0, all = units;
    UNROLL for (int mask = 1; mask < target::kWave; mask *= 2) {
      const unsigned other = target::shuffle_xor(all, mask);
      if (lane & mask) before += other;
      all += other;
    }
    longest = target::wave_max(longest);
    if (lane == 0) {
      room.sums[wave] = static_cast<int>(all);
      room.longest[wave] = static_cast<int>(longest);
    }
    target::block_sync();
    total = 0;
    UNROLL for (int n = 0; n < kSums; n++) {
      if (n == wave) before += total;
      total += room.sums[n];
      longest = max_of(room.longest[n], longest);
    }
    share_out();
    const bool alone = are_alone(static_cast<int>(longest));
    const int ranks = p.splits.ranks, own_rank = part - thread * ranks;
    const int from = static_cast<int>(before);
    if (alone ? own_rank >= 0 && own_rank < ranks : from <= at && at - from < units) {  // one thread, or none
      room.sequence = thread * some;
      room.start = from;
      room.own = own;
      room.q = q;
      room.k = k;
    }
    target::block_sync();
    sequence = room.sequence;
    start = room.start;
    own = room.own;
    q = room.q;
    k = room.k;
    if (alone) take(part < p.batch * ranks, part - sequence * ranks);
  }

  DEVICE static unsigned max_of(unsigned x, unsigned y) { return x > y ? x : y; }

  DEVICE void enter(int n) {
    sequence = n;
    if constexpr (kRagged) {
      q = span_of<kPlain>(p.q_side, n);
      k = span_of<kPlain>(p.k_side, n);
      if constexpr (kPaged) k.length = length_in_pages<kPlain>(p.pages, n, k.length);
    } else {
      q = {0, static_cast<int>(p.q_side.rows)};
      k = {0, static_cast<int>(p.k_side.rows)};
    }
    own = 0;
#pragma unroll 1
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
