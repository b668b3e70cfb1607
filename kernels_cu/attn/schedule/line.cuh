// How decoding (attn/decode.cuh) divides the keys of a batch evenly among blocks, however long sequences are: which
// keys of which query tiles a block has.
//
// The key tiles of all query tiles form a line: sequence after sequence, and in a sequence head after head. The line is
// cut into equal parts; of short sequences each may be a part instead. A part begins in one query tile and may end in
// another. What it has of one query tile is a segment. The segments of a query tile are in consecutive parts, and are
// merged in the order of keys (attn/schedule/shared_tile.cuh). Lengths are read where the line is cut, so a batch whose
// lengths change on the GPU keeps its launch. (Stream-K, Osama et al. 2023, cuts sums of matrix products so.)
//
// Some heads stand abreast: a part then has a block for each of them. These blocks read the same rows at the same time,
// and the heads of a row are neighbours in memory. All heads that stand abreast are a rank, and the line has rank after
// rank of a sequence. A "head" here is a query tile's kHeads heads.
//
// Lengths in the line are counted in units of kUnit key tiles. Where the number of pieces of a query tile is given
// (num_splits), a unit is such a piece instead, and a part is one unit.
#pragma once

#include "attn/pages.cuh"
#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "attn/tiles.cuh"
#include "target/target.cuh"

// What a part has of a query tile.
struct Segment {
  int sequence, head, tile;  // head: the first one of the query tile
  int kv_head;
  int rows;  // of the query tile, in all its heads
  Span q, k;
  int units;     // of the query tile
  int from, to;  // the units of the segment: [from, to)
  int start;     // where the query tile begins in the line

  DEVICE bool whole() const { return from == 0 && to == units; }
};

// The line, and what is left of a block's part. kPlain: lengths and pages have their plain form (attn/sequence.cuh).
// kHeads: heads of a query tile. kRest: the query heads of a kv head are no multiple of kHeads, so the last tile has
// fewer. kUnit: key tiles of a unit.
template <bool kRagged, bool kPaged, bool kPlain, class Visible, int kTileQ, int kTileK, int kHeads, bool kRest,
          int kUnit, int kThreads>
struct Line {
  using Tiles = KeyTiles<Visible, kTileQ, kTileK>;
  static constexpr int kSums = kThreads / target::kWave;

  // What threads tell each other in find(): units of each wave's sequences, and the sequence that all enter. Members
  // are as below.
  struct Room {
    int sums[kSums], longest[kSums];
    int sequence, start, rank_units;
    Span q, k;
  };

  const ForwardParams& p;
  int part;           // the part of this block
  int abreast_index;  // number of this block among those abreast, which have the same part
  int total;          // units of the line; the host has checked that an int holds it
  int parts;          // number of parts that the line is cut into
  int at, end;        // what is left of this block's part: units [at, end)
  int sequence;       // the sequence that has been entered: that of unit `at`, or one before it
  int rank;           // the rank that has been entered in this sequence: that of unit `at`, or one before it
  int start;          // where this rank begins in the line
  Span q, k;          // of the sequence
  int rank_units;     // units of each rank of the sequence

  // Sets what follows from the launch alone. Lengths are not read.
  DEVICE explicit Line(const ForwardParams& p)
      : p(p),
        part(quotient(target::block_index(), p.splits.abreast)),
        abreast_index(target::block_index() - part * p.splits.abreast),
        rank(0),
        start(0) {}

  // Cuts the line. Reads lengths, which earlier kernels may have written. room: in shared memory. All threads of the
  // block call it.
  DEVICE void cut(Room& room) {
    if (kRagged && p.batch > 1) {
      find(room);
      return;
    }
    enter(0);
    const int each = rank_units * p.splits.ranks;
    total = each * p.batch;
    cut_equally();
    if (kRagged && prefer_part_per_rank(rank_units)) {
      take_rank(part < p.splits.ranks, part);
      return;
    }
    // All sequences are alike.
    if (p.batch > 1 && at < end) sequence = quotient(at, each);
    start = each * sequence;
  }

  // Takes the first segment of what is left, which must not be empty.
  DEVICE Segment next() {
    while (at - start >= rank_units) {
      start += rank_units;
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
    segment.units = q.length <= kTileQ ? rank_units : units_of_tiles(count(0));
    while (rest >= segment.units) {
      rest -= segment.units;
      segment.units = units_of_tiles(count(++segment.tile));
    }
    locate(segment);
    segment.start = at - rest;
    segment.from = rest;
    const int left = end - at + rest;
    segment.to = left < segment.units ? left : segment.units;
    at += segment.to - segment.from;
    return segment;
  }

  // The key tiles of a segment. all: those of its query tile.
  DEVICE TileSpan tiles(const Segment& segment, const TileSpan& all) const {
    const int tiles = all.count();
    if (p.splits.count > 0) {
      return {all.begin + static_cast<int>(int64(tiles) * segment.from / segment.units),
              all.begin + static_cast<int>(int64(tiles) * segment.to / segment.units)};
    }
    const int to = segment.to * kUnit;
    return {all.begin + segment.from * kUnit, all.begin + (to < tiles ? to : tiles)};
  }

  // x / y. For numbers that are not negative, the unsigned division takes a third of the instructions of the signed
  // one.
  DEVICE static int quotient(int x, int y) { return static_cast<int>(static_cast<unsigned>(x) / unsigned(y)); }

  // Where a part begins, and the part that has a unit. Parts that are one unit longer are spread among the others, so
  // that parts of alike sequences end where the sequences end.
  DEVICE int begin_of(int part) const { return part * whole + quotient(part * longer, parts); }
  DEVICE int part_of(int unit) const {
    if (longer == 0) return quotient(unit, whole);
    int part = static_cast<int>(static_cast<float>(unit) * static_cast<float>(parts) / static_cast<float>(total));
    while (begin_of(part) > unit) part--;
    while (begin_of(part + 1) <= unit) part++;
    return part;
  }

 private:
  int whole, longer;  // units of a part; `longer` of the parts have one more

  // Sets the heads and the rows of a segment.
  DEVICE void locate(Segment& segment) const {
    const int beside = rank * p.splits.abreast + abreast_index, left = q.length - segment.tile * kTileQ;
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

  // Cuts the line into equal parts and sets this block's part. There are as many parts as blocks, but fewer where a
  // part would have less than one unit, or in ragged batches less than splits.least. Even then there is a part for each
  // rank of each sequence, as far as there are blocks and units.
  DEVICE void cut_equally() {
    parts = total;
    if (p.splits.count == 0) {
      const int blocks = p.splits.blocks, least = kRagged ? p.splits.least : 1;
      int most = blocks;
      if (total < blocks * least) {
        most = kRagged ? quotient(total + least - 1, least) : total;
        // A sequence without queries has no unit, and no part may be empty, since its block would arrive nowhere.
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

  // Whether each rank of each sequence should rather be a part of its own. This compares estimated times, in units. A
  // part takes the time of its own units and that of the memory for all units, combined as below. Equal parts also take
  // the time to merge what they leave of a query tile: merge_units, which is larger where a part may end within another
  // query tile. Beside more than kMost units that is little (docs/notes/decode.md). longest: the most units of a rank.
  DEVICE bool prefer_part_per_rank(int longest) const {
    constexpr int kMost = 16;
    const int streams = p.batch * p.splits.ranks;
    if (p.splits.count > 0 || longest > kMost || streams > p.splits.blocks || p.batch > kThreads) return false;
    // Where sequences are equal and have several parts each, parts end where sequences do, but for a few numbers of
    // parts.
    const bool aligned = total == parts || (total == longest * streams && parts >= 2 * streams);
    const float merge_units = aligned ? 1.5f : 5.0f, shared = static_cast<float>(whole + (longer > 0 ? 1 : 0));
    const float memory = static_cast<float>(total) * p.splits.per_busy, alone = static_cast<float>(longest);
    // alone^2 + memory^2 < (sqrt(shared^2 + memory^2) + merge_units)^2
    const float root = fmaxf(shared, memory) + 0.4f * fminf(shared, memory);
    return alone * alone < shared * shared + merge_units * (merge_units + 2.0f * root);
  }
  // Makes a rank of the entered sequence, which begins at `start`, the block's part. exists: whether the block has a
  // part.
  DEVICE void take_rank(bool exists, int own_rank) {
    at = end = 0;
    if (!exists) return;
    rank = own_rank;
    start += rank_units * rank;
    at = start;
    end = at + rank_units;
  }

  // cut() where sequences differ. Each thread counts the units of some consecutive sequences. Sums over the lanes of a
  // wave, then over waves, give the units before these. The thread in whose sequences this block's part begins tells
  // all threads the first of these sequences, which they enter.
  DEVICE void find(Room& room) {
    const int thread = target::thread_index(), lane = thread % target::kWave, wave = thread / target::kWave;
    const int some = (p.batch + kThreads - 1) / kThreads;
    int units = 0;
    unsigned longest = 0;  // the most units of a rank
    const int behind = (thread + 1) * some;
    // In descending order, so that the thread's first sequence stays entered.
    for (int n = (behind < p.batch ? behind : p.batch) - 1; n >= thread * some; n--) {
      enter(n);
      units += rank_units * p.splits.ranks;
      longest = max_of(rank_units, longest);
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
    cut_equally();
    const bool alone = prefer_part_per_rank(static_cast<int>(longest));
    const int ranks = p.splits.ranks, own_rank = part - thread * ranks;
    const int from = static_cast<int>(before);
    if (alone ? own_rank >= 0 && own_rank < ranks : from <= at && at - from < units) {  // one thread, or none
      room.sequence = thread * some;
      room.start = from;
      room.rank_units = rank_units;
      room.q = q;
      room.k = k;
    }
    target::block_sync();
    sequence = room.sequence;
    start = room.start;
    rank_units = room.rank_units;
    q = room.q;
    k = room.k;
    if (alone) take_rank(part < p.batch * ranks, part - sequence * ranks);
  }

  DEVICE static unsigned max_of(unsigned x, unsigned y) { return x > y ? x : y; }

  // Reads the lengths of sequence n and counts its units.
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
    rank_units = 0;
#pragma unroll 1
    for (int tile = 0; tile * kTileQ < q.length; tile++) rank_units += units_of_tiles(count(tile));
  }
  // Key tiles of a query tile of the sequence.
  DEVICE int count(int tile) const {
    const int first = tile * kTileQ;
    const int last = first + kTileQ < q.length ? first + kTileQ - 1 : q.length - 1;
    return Tiles(Visible(p, sequence, q.length, k.length), first, last).count();
  }
  // Units of a query tile with so many key tiles. One without keys still has a unit, which writes its rows.
  DEVICE int units_of_tiles(int tiles) const {
    const int most = p.splits.count;
    const int n = most > 0 ? (tiles < most ? tiles : most) : (tiles + kUnit - 1) / kUnit;
    return n > 0 ? n : 1;
  }
};
