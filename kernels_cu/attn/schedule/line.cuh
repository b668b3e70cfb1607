// How decoding (attn/decode.cuh) divides the keys of a batch evenly among blocks, however long sequences are: which
// keys of which query tiles a block has.
//
// The key tiles of all query tiles form a line: sequence after sequence, and in a sequence head after head. The line is
// cut into equal parts. A part begins in one query tile and may end in another. What it has of one query tile is a
// segment. The segments of a query tile are in consecutive parts, and are merged in the order of keys
// (attn/schedule/shared_tile.cuh). Lengths are read where the line is cut, so a batch whose lengths change on the GPU
// keeps its launch. (Stream-K, Osama et al. 2023, cuts sums of matrix products so.)
//
// A part that ends within a query tile takes long to merge. So where query tiles are few or alike, each is cut into as
// many equal pieces instead, or into one, and a part is a piece.
//
// Some heads stand abreast: a part then has a block for each of them. These blocks read the same rows at the same time,
// and the heads of a row are neighbours in memory. All heads that stand abreast are a rank, and the line has rank after
// rank of a sequence. A "head" here is a query tile's kHeads heads.
//
// Lengths in the line are counted in units of kUnit key tiles. Where parts are pieces of query tiles, a unit is such a
// piece instead, and a part is one unit. Of a query tile with few key tiles some pieces may have none.
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

  // What threads tell each other in find(): units and query tiles of each wave's sequences, the most units of a query
  // tile, and the sequence that all enter. Members are as below.
  struct Room {
    int units[kSums], tiles[kSums], longest[kSums];
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
        start(0),
        pieces(p.splits.count) {}

  // Cuts the line. Reads lengths, which earlier kernels may be writing: one thread reads where a sequence lies, so that
  // all threads have the same, and calls see(n, q, k). room: in shared memory. All threads of the block call it.
  template <class See>
  DEVICE void cut(Room& room, const See& see) {
    if (kRagged && p.batch > 1) {
      find(room, see);
      return;
    }
    sequence = 0;
    if constexpr (kRagged) {
      if (target::thread_index() == 0) {
        read(0);
        see(0, q, k);
        room.q = q;
        room.k = k;
      }
      target::block_sync();
      q = room.q;
      k = room.k;
    } else {
      read(0);
    }
    rank_units = units_of_rank();
    const int each = rank_units * p.splits.ranks;
    total = each * p.batch;
    cut_equally();
    if constexpr (kRagged) {
      cut_tiles_alike(most_units, query_tiles() * p.splits.ranks);
      if (pieces > 0) rank_units = pieces * query_tiles();
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
    segment.units = q.length <= kTileQ ? rank_units : units_of_tile(0);
    while (rest >= segment.units) {
      rest -= segment.units;
      segment.units = units_of_tile(++segment.tile);
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
    if (pieces > 0) {
      return {all.begin + static_cast<int>(int64(tiles) * segment.from / segment.units),
              all.begin + static_cast<int>(int64(tiles) * segment.to / segment.units)};
    }
    const int to = segment.to * kUnit;
    return {all.begin + segment.from * kUnit, all.begin + (to < tiles ? to : tiles)};
  }

  // Whether a part has at most so many units, where a piece counts for `turns` of them.
  DEVICE bool has_few_units(int most, int turns) const { return whole <= most && turns <= most; }

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
  int pieces;         // of each query tile, each a part; 0 where parts are equal
  int whole, longer;  // units of a part; `longer` of the parts have one more
  int most_units;     // of a query tile of the sequence that was entered last, where parts are equal

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

  // Cuts each query tile into as many pieces instead, if that is expected to take less time. This compares times in
  // units. A part takes the time of its own units and of merging, or that of the memory for all units if it is longer
  // (docs/notes/decode.md). Pieces of query tiles with the same keys begin at the same keys, which come from memory
  // once. longest: the most units of a query tile; tiles: query tiles of all ranks.
  DEVICE void cut_tiles_alike(int longest, int tiles) {
    if (p.splits.count > 0 || tiles == 0 || tiles > p.splits.blocks) return;
    // Quotients of floats: a division of integers takes ten times as long, and no copy can begin before this is known.
    const float per_tile = target::reciprocal(static_cast<float>(tiles)), length = static_cast<float>(longest);
    const int room = static_cast<int>(static_cast<float>(p.splits.blocks) * per_tile + kRounding);
    const int most = room < longest ? room : longest;
    const float own = length * target::reciprocal(static_cast<float>(most));
    const float whole_units = static_cast<float>(static_cast<int>(own + (1.0f - kRounding)));
    // About the root of the sum of squares.
    const auto time = [](float own, float memory) { return fmaxf(own, memory) + 0.4f * fminf(own, memory); };
    const auto merging = [](float parts) { return 2.0f + 0.08f * parts; };
    const float memory = static_cast<float>(total) * p.splits.per_busy;
    const float once = memory * static_cast<float>(p.batch * p.splits.ranks) * per_tile;
    const float shared = merging(fmaxf(static_cast<float>(parts) * per_tile, 2.0f)) + kCutTiles;
    const float equal = time(static_cast<float>(whole + (longer > 0 ? 1 : 0)) + shared, memory);
    const float alone = time(length, once);
    const float alike = time(whole_units + merging(static_cast<float>(most)), once);
    if (fminf(alone, alike) >= equal) return;
    pieces = alone <= alike ? 1 : most;
    total = parts = pieces * tiles;
    whole = 1;
    longer = 0;
    at = part < parts ? part : 0;
    end = part < parts ? part + 1 : 0;
  }
  static constexpr float kCutTiles = 3.0f;  // what it takes that parts end within query tiles, in units
  static constexpr float kRounding = 1e-3f;

  // cut() where sequences differ. Each thread counts the units of some consecutive sequences. Sums over the lanes of a
  // wave, then over waves, give the units before these. The thread in whose sequences this block's part begins tells
  // all threads the first of these sequences, which they enter.
  template <class See>
  DEVICE void find(Room& room, const See& see) {
    const int thread = target::thread_index(), lane = thread % target::kWave, wave = thread / target::kWave;
    const int some = (p.batch + kThreads - 1) / kThreads;
    int units = 0, tiles = 0;
    unsigned most = 0;  // units of a query tile
    const int behind = (thread + 1) * some;
    // In descending order, so that the thread's first sequence stays entered.
    for (int n = (behind < p.batch ? behind : p.batch) - 1; n >= thread * some; n--) {
      enter(n);
      see(n, q, k);
      units += rank_units * p.splits.ranks;
      tiles += query_tiles() * p.splits.ranks;
      most = max_of(most_units, most);
    }
    unsigned units_before = 0, all_units = units, tiles_before = 0, all_tiles = tiles;
    UNROLL for (int mask = 1; mask < target::kWave; mask *= 2) {
      const unsigned other = target::shuffle_xor(all_units, mask), others = target::shuffle_xor(all_tiles, mask);
      if (lane & mask) {
        units_before += other;
        tiles_before += others;
      }
      all_units += other;
      all_tiles += others;
    }
    most = target::wave_max(most);
    if (lane == 0) {
      room.units[wave] = static_cast<int>(all_units);
      room.tiles[wave] = static_cast<int>(all_tiles);
      room.longest[wave] = static_cast<int>(most);
    }
    target::block_sync();
    total = 0;
    all_tiles = 0;
    UNROLL for (int n = 0; n < kSums; n++) {
      if (n == wave) {
        units_before += total;
        tiles_before += all_tiles;
      }
      total += room.units[n];
      all_tiles += room.tiles[n];
      most = max_of(room.longest[n], most);
    }
    cut_equally();
    cut_tiles_alike(static_cast<int>(most), static_cast<int>(all_tiles));
    const int from = static_cast<int>(pieces > 0 ? pieces * tiles_before : units_before);
    if (from <= at && at - from < (pieces > 0 ? pieces * tiles : units)) {  // one thread, or none
      room.sequence = thread * some;
      room.start = from;
      room.rank_units = pieces > 0 ? pieces * query_tiles() : rank_units;
      room.q = q;
      room.k = k;
    }
    target::block_sync();
    sequence = room.sequence;
    start = room.start;
    rank_units = room.rank_units;
    q = room.q;
    k = room.k;
  }

  DEVICE static unsigned max_of(unsigned x, unsigned y) { return x > y ? x : y; }

  // Reads the lengths of sequence n and counts its units.
  DEVICE void enter(int n) {
    sequence = n;
    read(n);
    rank_units = units_of_rank();
  }
  DEVICE void read(int n) {
    if constexpr (kRagged) {
      q = span_of<kPlain>(p.q_side, n);
      k = span_of<kPlain>(p.k_side, n);
      if constexpr (kPaged) k.length = length_in_pages<kPlain>(p.pages, n, k.length);
    } else {
      q = {0, static_cast<int>(p.q_side.rows)};
      k = {0, static_cast<int>(p.k_side.rows)};
    }
  }
  // Units of a rank of the sequence.
  DEVICE int units_of_rank() {
    if (pieces > 0) return pieces * query_tiles();
    int units = 0;
    most_units = 0;
#pragma unroll 1
    for (int tile = 0; tile * kTileQ < q.length; tile++) {
      const int some = units_of_tile(tile);
      units += some;
      most_units = some > most_units ? some : most_units;
    }
    return units;
  }
  // Query tiles of a rank of the sequence.
  DEVICE int query_tiles() const { return quotient(q.length + kTileQ - 1, kTileQ); }
  // Key tiles of a query tile of the sequence.
  DEVICE int count(int tile) const {
    const int first = tile * kTileQ;
    const int last = first + kTileQ < q.length ? first + kTileQ - 1 : q.length - 1;
    return Tiles(Visible(p, sequence, q.length, k.length), first, last).count();
  }
  // Units of a query tile of the sequence. One without keys still has a unit, which writes its rows.
  DEVICE int units_of_tile(int tile) const {
    if (pieces > 0) return pieces;
    const int n = (count(tile) + kUnit - 1) / kUnit;
    return n > 0 ? n : 1;
  }
};
