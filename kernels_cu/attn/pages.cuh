// Paged keys and values: where the rows of a sequence lie in pages of an array that sequences share, how many keys its
// pages hold, and which rows a query tile may read.
#pragma once

#include "attn/params.cuh"
#include "attn/rows.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"
#include "tile/rows.cuh"

// The entries of a sequence in the block table: [first, first + count). They follow from unchecked integers, and are
// clamped to the table.
struct PageSpan {
  int64 first, count;
};
template <bool kPlain = false>
DEVICE PageSpan pages_of(const Pages& pages, int sequence) {
  if (kPlain || pages.indptr.data == nullptr) return {0, pages.capacity};
  const int64 first = clamp(integer_at(pages.indptr, sequence), 0, pages.capacity);
  return {first, clamp(integer_at(pages.indptr, sequence + 1), first, pages.capacity) - first};
}

// The length of a sequence, but no more than its pages hold.
template <bool kPlain = false>
DEVICE int length_in_pages(const Pages& pages, int sequence, int length) {
  const int64 room = pages_of<kPlain>(pages, sequence).count * pages.page_size;
  return length < room ? length : static_cast<int>(room);
}

// Prefetches lengths and block table, so that they are in the cache or on their way when they are read. Each thread of
// the grid prefetches a cache line of each. thread: its number in the grid.
DEVICE void prefetch_pages(const Pages& pages, const Integers& lengths, int batch, int64 thread) {
  constexpr int kLine = 128;
  if (lengths.data != nullptr && thread * kLine < int64(batch) * (lengths.is_64bit ? 8 : 4)) {
    target::prefetch(static_cast<const unsigned char*>(lengths.data) + thread * kLine);
  }
  const int rows = pages.indptr.data == nullptr ? batch : 1;
  if (pages.entry != 1 || pages.row < 0 || rows == 0) return;
  const int64 bytes = ((rows - 1) * pages.row + pages.capacity) * (pages.ids.is_64bit ? 8 : 4);
  const unsigned char* const first = static_cast<const unsigned char*>(pages.ids.data);
  if (thread * kLine < bytes) target::prefetch(first + thread * kLine);
}

// The block table of a sequence, which has `span.length` keys.
template <bool kPlain = false>
DEVICE PageTable<kPlain> page_table(const Pages& pages, int sequence, const Span& span) {
  const int64 before = pages_of<kPlain>(pages, sequence).first * pages.entry + sequence * pages.row;
  const int bytes = !kPlain && pages.ids.is_64bit ? 8 : 4;
  PageTable<kPlain> table;
  table.ids = static_cast<const unsigned char*>(pages.ids.data) + before * bytes;
  table.stride = pages.entry;
  table.page_count = pages.count;
  table.page_rows = pages.page_size;
  table.inverse = pages.inverse;
  table.shift = pages.shift;
  table.last_entry = span.length > 0 ? table.page_of_row(span.length - 1) : 0;
  table.is_64bit = pages.ids.is_64bit != 0;
  return table;
}

// The rows of a kv head of a sequence, in pages or not. The sequence has `span.length` keys.
template <bool kPaged, class T>
DEVICE auto rows_of_keys(const void* array, const Strides& strides, const Pages& pages, int sequence, const Span& span,
                         int head) {
  if constexpr (kPaged) {
    T* const first = static_cast<T*>(array) + head * strides.head;
    return PagedRows<T>{first, strides.batch, strides.row, page_table(pages, sequence, span), 0};
  } else {
    return rows_of<T>(array, strides, sequence, span, head);
  }
}

// A predicate for the rows of a key tile, which begins at the key `first`: whether a row is real and within these
// limits.
template <class Real>
struct RowsInRange {
  int first, left, right, sink;
  Real real;

  DEVICE bool operator()(int row) const {
    const int key = first + row;
    return is_real(real, row) && key <= right && (key >= left || key < sink);
  }
  // Whether all of these rows are. May be false for a tile that reaches from sink tokens into the window.
  DEVICE bool all(int rows) const {
    const int last = first + rows - 1;
    return all_real(real, rows) && last <= right && (first >= left || last < sink);
  }
};

// The keys that some query row of a tile may see by the rule of visible keys. Other keys may lie in pages that no
// longer belong to the sequence, whose contents must not reach any result. kLimited: false where no such test is
// needed.
template <bool kLimited>
struct VisibleRange {
  template <class Visible>
  DEVICE VisibleRange(const Visible&, int, int) {}
  template <class Real>
  DEVICE Real rows(int, const Real& real) const {
    return real;
  }
  DEVICE bool overlaps(int first, int, int length) const { return first < length; }
};
template <>
struct VisibleRange<true> {
  int left, right, sink;

  // For query rows [first, last].
  template <class Visible>
  DEVICE VisibleRange(const Visible& visible, int first, int last)
      : left(visible.row(first).left), right(visible.row(last).right), sink(visible.sink) {}

  // The rows from first_key on that are `real` and within range.
  template <class Real>
  DEVICE RowsInRange<Real> rows(int first_key, const Real& real) const {
    return {first_key, left, right, sink, real};
  }
  // Whether any of `count` keys from `first` on is within range, in a sequence of `length` keys.
  DEVICE bool overlaps(int first, int count, int length) const {
    return first < length && first <= right && (first + count > left || first < sink);
  }
};
