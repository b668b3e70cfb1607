// Which keys a query sees, and which key tiles a query tile must therefore visit.
//
//   visible(i, j) = j <= i + offset + right  and  (j >= i + offset - left  or  j < sink)  and  j < len_k
//
// offset aligns the diagonal: len_k - len_q (bottom-right) or 0 (top-left).
#pragma once

#include "attn/params.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"

// The keys one query row sees: columns [left, right] and [0, sink), none beyond right.
struct RowLimits {
  int left, right;
};

// kRight, kLeft: whether the visible keys are limited on that side. Both false: every key of the sequence is visible.
template <bool kLeft, bool kRight, bool kTopLeft, int kTileK>
struct VisibleKeys {
  int64 left, right;
  int offset, len_k, sink;

  DEVICE VisibleKeys(const ForwardParams& p, int len_q, int len_k)
      : left(p.window_left),
        right(p.window_right),
        offset(kTopLeft ? 0 : len_k - len_q),
        len_k(len_k),
        sink(static_cast<int>(clamp(p.sink, 0, len_k))) {}

  DEVICE RowLimits row(int i) const {
    RowLimits limits{0, len_k - 1};
    if constexpr (kRight) limits.right = static_cast<int>(clamp(int64(i) + offset + right, -1, len_k - 1));
    if constexpr (kLeft) limits.left = static_cast<int>(clamp(int64(i) + offset - left, 0, len_k));
    return limits;
  }

  DEVICE bool operator()(const RowLimits& limits, int j) const {
    return j <= limits.right && (!kLeft || j >= limits.left || j < sink);
  }
};

// The key tiles rows [first, last] visit, in order: those holding sink tokens, then the window's. `tile(n)` is the
// n-th.
struct TileRange {
  int sinks, skipped, count;

  DEVICE int tile(int n) const { return n < sinks ? n : n + skipped; }
};

template <bool kLeft, bool kRight, bool kTopLeft, int kTileK>
DEVICE TileRange tiles_seen(const VisibleKeys<kLeft, kRight, kTopLeft, kTileK>& visible, int first, int last) {
  const int end = (visible.row(last).right + kTileK) / kTileK;
  if constexpr (!kLeft) {
    return {0, 0, end};
  } else {
    int begin = visible.row(first).left / kTileK;
    if (begin > end) begin = end;
    int sinks = (visible.sink + kTileK - 1) / kTileK;
    if (sinks > begin) sinks = begin;
    return {sinks, begin - sinks, sinks + end - begin};
  }
}

// Whether every row of [first, last] sees every key of the tile: then no element needs a test.
template <bool kLeft, bool kRight, bool kTopLeft, int kTileK>
DEVICE bool tile_is_full(const VisibleKeys<kLeft, kRight, kTopLeft, kTileK>& visible, int tile, int first, int last) {
  const int j_first = tile * kTileK;
  const int j_last = j_first + kTileK - 1;
  bool full = j_last <= visible.row(first).right;
  if constexpr (kLeft) full = full && (j_first >= visible.row(last).left || j_last < visible.sink);
  return full;
}

// Scores of keys that a row does not see become -inf. first_row and first_key are those of the accumulators' first
// element.
template <class Visible, class C, int kRowBlocks, int kKeyBlocks>
DEVICE void hide_unseen(C (&s)[kRowBlocks][kKeyBlocks], const Visible& visible, int first_row, int first_key,
                        int lane) {
  UNROLL for (int m = 0; m < kRowBlocks; m++) {
    UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
      const RowLimits limits = visible.row(first_row + m * 16 + C::row(lane, slot));
      UNROLL for (int n = 0; n < kKeyBlocks; n++) {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          if (C::slot(e) == slot && !visible(limits, first_key + n * 16 + C::column(lane, e))) {
            s[m][n].x[e] = -target::infinity();
          }
        }
      }
    }
  }
}
