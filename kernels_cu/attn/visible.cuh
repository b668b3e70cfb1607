// Which keys a query sees.
//
//   visible(i, j) = j <= i + offset + right  and  (j >= i + offset - left  or  j < sink)  and  j < len_k
//
// offset aligns the diagonal: len_k - len_q (bottom-right), 0 (top-left), or the position of the first query less that
// of the first key. Then sink counts from the first key of the whole sequence.
#pragma once

#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

// The keys that one query row sees: [left, right], and of [0, sink) those that are not beyond right.
struct RowLimits {
  int left, right;
};
// The query rows that see one key: [first, last].
struct QueryLimits {
  int first, last;
};

// Which limits of the visible keys cross a rectangle of scores. Where none does, no element needs a test.
struct Edges {
  bool left, right;

  DEVICE bool any() const { return left || right; }
};

// kRight, kLeft: whether the visible keys are limited on that side. Both false: every key of the sequence is visible.
// kTopLeft: whether the diagonal is aligned to the top left. kPositions: whether it is given by positions.
template <bool kLeft, bool kRight, bool kTopLeft, bool kPositions>
struct VisibleKeys {
  static constexpr bool kLimitedLeft = kLeft, kLimitedRight = kRight;

  int64 left, right;
  int offset, len_k, sink;

  VisibleKeys() = default;
  DEVICE VisibleKeys(const ForwardParams& p, int sequence, int len_q, int len_k)
      : left(p.mask.window_left),
        right(p.mask.window_right),
        offset(kTopLeft ? 0 : len_k - len_q),
        len_k(len_k),
        sink(static_cast<int>(clamp(p.mask.sink, 0, len_k))) {
    if constexpr (kPositions) {
      const int first_key = position_of<true>(p.k_side, sequence);
      offset = position_of<true>(p.q_side, sequence) - first_key;
      sink = static_cast<int>(clamp(p.mask.sink - first_key, 0, len_k));
    }
  }

  DEVICE RowLimits row(int i) const {
    RowLimits limits{0, len_k - 1};
    if constexpr (kRight) limits.right = static_cast<int>(clamp(int64(i) + offset + right, -1, len_k - 1));
    if constexpr (kLeft) limits.left = static_cast<int>(clamp(int64(i) + offset - left, 0, len_k));
    return limits;
  }

  DEVICE QueryLimits key(int j) const {
    constexpr int kEnd = 0x7fffffff;
    QueryLimits limits{0, kEnd};
    if constexpr (kRight) limits.first = static_cast<int>(clamp(int64(j) - offset - right, 0, kEnd));
    if constexpr (kLeft) limits.last = j < sink ? kEnd : static_cast<int>(clamp(int64(j) - offset + left, -1, kEnd));
    if (j >= len_k) limits.first = kEnd;
    return limits;
  }

  // Of the rectangle of keys [first_key, last_key] and rows [first, last].
  DEVICE Edges edges(int first_key, int last_key, int first, int last) const {
    Edges edges{false, last_key > row(first).right};
    if constexpr (kLeft) edges.left = first_key < row(last).left && last_key >= sink;
    return edges;
  }
};

// The visible keys of a tile with rows of several heads, as in decoding: row r is one of query first + r / kHeads.
template <class Visible, int kHeads>
struct RowsOfHeads {
  static constexpr bool kLimitedLeft = Visible::kLimitedLeft, kLimitedRight = Visible::kLimitedRight;

  const Visible& visible;
  int first, sink;

  DEVICE RowLimits row(int r) const { return visible.row(first + r / kHeads); }
};
