// A query tile that several parts of the line share (attn/schedule/line.cuh): where the block of each part leaves its
// partial result, and which block merges them.
//
// The last block to arrive merges them. With very many parts, this one block would take longer to read them than any
// block took to read keys. So consecutive parts then form bunches. The last block of a bunch merges its parts to one
// partial result, and the last block to do so merges those of the bunches.
#pragma once

#include "attn/schedule/line.cuh"

template <class Partials>
struct SharedTile {
  static constexpr int kAtOnce = 16;         // parts of a bunch at most, whose loads are all in flight together
  static constexpr int kMost = 2 * kAtOnce;  // parts that are merged without bunches, at most

  // The partial results of consecutive parts, at equal distances in memory but for the first one.
  struct Parts {
    Partials *first, *all;
    int64 stride;

    DEVICE Partials& operator()(int n) const { return n == 0 ? *first : all[n * stride]; }
    DEVICE Parts from(int n) const { return {n == 0 ? first : all + n * stride, all + n * stride, stride}; }
    // The partial results of bunches of `size` parts. Each lies in the second slot of the bunch's second part, which
    // has no other use, since no query tile begins in that part.
    DEVICE Parts bunches(int size) const {
      Partials* const merged = all + stride + 1;
      return {merged, merged, size * stride};
    }
  };

  Segment segment;    // the segment of this block
  int part;           // the part of this block
  int first, count;   // the parts that share the query tile: [first, first + count)
  Parts parts;        // their partial results
  Partials* own;      // the partial result of this block's part
  unsigned* arrived;  // the counter of the first part; those of parts that follow are `abreast` apart

  // One thread makes it when the segment begins: at the end of a segment nothing hides that addresses are computed.
  template <class BlockLine>
  DEVICE SharedTile(const BlockLine& line, const Segment& segment, const Splits& splits)
      : segment(segment),
        part(line.part),
        first(segment.from == 0 ? part : line.part_of(segment.start)),
        count((segment.to == segment.units ? part : line.part_of(segment.start + segment.units - 1)) + 1 - first) {
    // The block of the first part, with the same number among those abreast as this block.
    const int64 block = int64(first) * splits.abreast + line.abreast_index;
    // A part shares at most two query tiles with others: the one in which it begins, and the one in which it ends. It
    // has a slot for each, in this order.
    const int slots = slots_of(splits), begins_inside = line.begin_of(first) < segment.start;
    Partials* const all = static_cast<Partials*>(splits.partials) + block * slots;
    parts = {all + begins_inside, all, int64(splits.abreast) * slots};
    own = &parts(part - first);
    arrived = splits.arrived + block;
  }

  // One of `bunches` bunches: it has the parts [begin, begin + count), counted from the query tile's first. All bunches
  // have `size` parts, but for the last one, which has at least three. So the second part of a bunch is neither the
  // first nor the last of the query tile, and no other query tile begins or ends in it.
  struct Bunch {
    int begin, count, size, bunches;
  };
  // The bunch of the block's own part.
  DEVICE Bunch bunch(const Splits& splits) const {
    if (count <= kMost || slots_of(splits) < 2) return {0, count, count, 1};
    int size = kAtOnce;
    while ((count - 1) % size < 2) size--;
    const int begin = (part - first) / size * size, rest = count - begin;
    return {begin, rest < size ? rest : size, size, (count + size - 1) / size};
  }

  // Says that the partial result of the block's own part is there. Returns whether those of all parts of its bunch are.
  // One thread of the block calls it, between two barriers of the block.
  DEVICE bool arrive(const Splits& splits) const {
    const Bunch bunch = this->bunch(splits);
    return arrive_at(splits, bunch.begin, bunch.count);
  }
  // The same for the block's bunch among all bunches, whose counter is that of the query tile's second part.
  DEVICE bool arrive_of_bunch(const Splits& splits, int bunches) const { return arrive_at(splits, 1, bunches); }

 private:
  DEVICE static int slots_of(const Splits& splits) { return splits.count > 0 ? 1 : 2; }

  // n: the part whose counter it is, counted from the first one.
  DEVICE bool arrive_at(const Splits& splits, int n, int expected) const {
    unsigned* const counter = arrived + int64(n) * splits.abreast;
    const bool last = target::fetch_add_acq_rel(counter, 1u) + 1 == static_cast<unsigned>(expected);
    if (last) *counter = 0;  // for the next launch
    return last;
  }
};
