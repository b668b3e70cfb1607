// A query tile that several blocks have parts of (line.cuh): where each leaves what its rows come to, and who joins
// them.
//
// The last block to be done joins them. Were there very many, that one block would read them for longer than any had
// read keys: so of many parts, some that follow each other make a bunch, which the last block of a bunch joins to one,
// and the last block of all joins those.
#pragma once

#include "attn/schedule/line.cuh"

template <class Partials>
struct SharedTile {
  static constexpr int kAtOnce = 16;         // parts of a bunch at most: their loads are all on their way together
  static constexpr int kMost = 2 * kAtOnce;  // parts that are no bunches

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

  // Some that follow each other, at equal distances but for the first one.
  struct Parts {
    Partials *first, *all;
    int64 stride;

    DEVICE Partials& operator()(int n) const { return n == 0 ? *first : all[n * stride]; }
    DEVICE Parts from(int n) const { return {n == 0 ? first : all + n * stride, all + n * stride, stride}; }
    // What bunches of so many parts come to: in the second slot of the second part of each, which has no other use,
    // since no query tile begins in it.
    DEVICE Parts bunches(int size) const {
      Partials* const joined = all + stride + 1;
      return {joined, joined, size * stride};
    }
  };
  // A part shares at most two query tiles with others: the one in which it begins, and the one in which it ends.
  DEVICE Parts parts(const Splits& splits) const {
    const int slots = slots_of(splits);
    Partials* const all = static_cast<Partials*>(splits.partials) + block(splits, first) * slots;
    return {all + int(begins_inside), all, int64(splits.abreast) * slots};
  }
  DEVICE Partials& own_partials(const Splits& splits) const { return parts(splits)(part - first); }

  // Parts [begin, begin + count) of `bunches` bunches, each of `size` parts but for the last one, which has three at
  // least: only the first bunch begins, and none has its second part, where another query tile begins or ends.
  struct Bunch {
    int begin, count, size, bunches;
  };
  // That of the block's own part.
  DEVICE Bunch bunch(const Splits& splits) const {
    if (count <= kMost || slots_of(splits) < 2) return {0, count, count, 1};
    int size = kAtOnce;
    while ((count - 1) % size < 2) size--;
    const int begin = (part - first) / size * size, rest = count - begin;
    return {begin, rest < size ? rest : size, size, (count + size - 1) / size};
  }

  // One thread of a block says that the block's own part is there, between two barriers. Whether all others of its
  // bunch are.
  DEVICE bool arrive(const Splits& splits) const {
    const Bunch own = bunch(splits);
    return arrive_at(splits, first + own.begin, own.count);
  }
  // Likewise, of its bunch, and all bunches. They meet at the second part's counter.
  DEVICE bool arrive_of_bunch(const Splits& splits, int bunches) const { return arrive_at(splits, first + 1, bunches); }

 private:
  DEVICE static int slots_of(const Splits& splits) { return splits.count > 0 ? 1 : 2; }

  DEVICE bool arrive_at(const Splits& splits, int part, int expected) const {
    unsigned* const arrived = splits.arrived + block(splits, part);
    const bool last = target::fetch_add_in_order(arrived, 1u) + 1 == static_cast<unsigned>(expected);
    if (last) *arrived = 0;  // for the next launch
    return last;
  }

  // The one that has a part, of those abreast of this block.
  DEVICE int64 block(const Splits& splits, int part) const { return int64(part) * splits.abreast + mate; }
};
