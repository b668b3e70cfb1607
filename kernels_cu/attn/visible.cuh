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
// The query rows that see one key: [first, last].
struct QueryLimits {
  int first, last;
};

// kRight, kLeft: whether the visible keys are limited on that side. Both false: every key of the sequence is visible.
template <bool kLeft, bool kRight, bool kTopLeft, int kTileK>
struct VisibleKeys {
  static constexpr bool kLimitedLeft = kLeft, kLimitedRight = kRight;

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

  DEVICE QueryLimits key(int j) const {
    constexpr int kEnd = 0x7fffffff;
    QueryLimits limits{0, kEnd};
    if constexpr (kRight) limits.first = static_cast<int>(clamp(int64(j) - offset - right, 0, kEnd));
    if constexpr (kLeft) limits.last = j < sink ? kEnd : static_cast<int>(clamp(int64(j) - offset + left, -1, kEnd));
    if (j >= len_k) limits.first = kEnd;
    return limits;
  }
};

// The key tiles rows [first, last] visit, in order: those holding sink tokens, then the window's. `tile(n)` is the
// n-th, for n in [begin, end).
struct TileRange {
  int sinks, skipped, end;
  int begin = 0;

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

// Those of a range's tiles, counted as it does, that some of its rows see: [begin, end).
struct TileSpan {
  int begin, end;
};

// For rows [first, last], none if last < first. Tiles of sink tokens come first, whatever the window leaves out.
template <bool kLeft, bool kRight, bool kTopLeft, int kTileK>
DEVICE TileSpan tiles_seen_of(const TileRange& range, const VisibleKeys<kLeft, kRight, kTopLeft, kTileK>& visible,
                              int first, int last) {
  if constexpr (!kLeft && !kRight) return {range.begin, last < first ? range.begin : range.end};
  if (last < first) return {0, 0};
  const TileRange own = tiles_seen(visible, first, last);
  const int end = own.end + own.skipped - range.skipped;
  return {visible.sink > 0 ? 0 : own.skipped - range.skipped, end};
}

// Which limits cross a tile of keys, for some row of [first, last]. Where none does, no element needs a test.
struct TileEdges {
  bool left, right;
};

template <bool kLeft, bool kRight, bool kTopLeft, int kTileK>
DEVICE TileEdges tile_edges(const VisibleKeys<kLeft, kRight, kTopLeft, kTileK>& visible, int tile, int first,
                            int last) {
  const int j_first = tile * kTileK;
  const int j_last = j_first + kTileK - 1;
  TileEdges edges{false, j_last > visible.row(first).right};
  if constexpr (kLeft) edges.left = j_first < visible.row(last).left && j_last >= visible.sink;
  return edges;
}

// What a tile's row does not see, counted from the tile's first key: keys beyond `right`, and keys from `sink` on that
// come before `left`. An element's place in the tile is known when the kernel is compiled, so a test is one comparison.
template <class Visible>
struct Unseen {
  int left, right, sink;

  DEVICE Unseen(const Visible& visible, int row, int first_key) {
    const RowLimits limits = visible.row(row);
    left = limits.left - first_key;
    right = limits.right - first_key;
    sink = visible.sink - first_key;
  }
  DEVICE bool beyond(int j) const { return j > right; }
  DEVICE bool before(int j) const { return j < left && j >= sink; }
};

// Elements of keys that a row does not see become `value`. first_row and first_key are those of the accumulators' first
// element. One edge at a time, since few tiles have both.
template <class Visible, class C, int kRowBlocks, int kKeyBlocks>
DEVICE void replace_unseen(C (&s)[kRowBlocks][kKeyBlocks], float value, const Visible& visible, const TileEdges& edges,
                           int first_row, int first_key, int lane) {
  const auto replace = [&](const auto& hides) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const Unseen<Visible> unseen(visible, first_row + m * 16 + C::row(lane, slot), first_key + C::column(lane, 0));
        UNROLL for (int n = 0; n < kKeyBlocks; n++) {
          UNROLL for (int i = 0; i < C::kRun; i++) {
            const int e = C::element(slot, i);
            if (hides(unseen, n * 16 + C::column(0, e))) s[m][n].x[e] = value;
          }
        }
      }
    }
  };
  if (edges.right) replace([](const Unseen<Visible>& unseen, int j) { return unseen.beyond(j); });
  if (edges.left) replace([](const Unseen<Visible>& unseen, int j) { return unseen.before(j); });
}

// The same where keys are rows and queries columns.
template <class Visible, class C, int kKeyBlocks, int kQueryBlocks>
DEVICE void replace_unseen_keys(C (&s)[kKeyBlocks][kQueryBlocks], float value, const Visible& visible,
                                const TileEdges& edges, int first_key, int first_row, int lane) {
  if (!edges.left && !edges.right) return;
  UNROLL for (int m = 0; m < kKeyBlocks; m++) {
    UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
      const QueryLimits limits = visible.key(first_key + m * 16 + C::row(lane, slot));
      const int first = limits.first - first_row - C::column(lane, 0);
      const int last = limits.last - first_row - C::column(lane, 0);
      UNROLL for (int n = 0; n < kQueryBlocks; n++) {
        UNROLL for (int i = 0; i < C::kRun; i++) {
          const int e = C::element(slot, i);
          const int query = n * 16 + C::column(0, e);
          const bool before = Visible::kLimitedRight ? query < first : limits.first > 0;  // no query, or all
          if (before || (Visible::kLimitedLeft && query > last)) s[m][n].x[e] = value;
        }
      }
    }
  }
}
