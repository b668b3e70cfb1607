// Types that say where rows lie in global memory: at equal distances, interleaved by heads, or in pages. Code that
// copies rows uses only their members address(), from() and shifted(), so another layout needs another type, not
// another copy.
#pragma once

#include "target/target.cuh"

// Rows at equal distances.
template <class T>
struct StridedRows {
  T* first;
  int64 stride;  // in elements

  DEVICE T* address() const { return first; }
  // The rows from the n-th on.
  DEVICE StridedRows from(int64 n) const { return {first + n * stride, stride}; }
  // The same rows, so many elements further on: of another head, or from another column on.
  DEVICE StridedRows shifted(int64 elements) const { return {first + elements, stride}; }
};

// Rows of kHeads heads, interleaved: the first row of each head, then the second row of each, and so on. Strides are in
// elements.
template <class T, int kHeads>
struct HeadsRows {
  T* first;
  int64 row_stride, head_stride;
  int row;

  DEVICE T* address() const { return first + row / kHeads * row_stride + row % kHeads * head_stride; }
  DEVICE HeadsRows from(int n) const { return {first, row_stride, head_stride, row + n}; }
  DEVICE HeadsRows shifted(int64 elements) const { return {first + elements, row_stride, head_stride, row}; }
};

// x / d for x below 2^31, by a multiplication: `shift` is the least s with 2^s >= d, `inverse` is
// floor(2^(31 + s) / d) + 1 (Granlund and Montgomery 1994).
DEVICE int quotient(int x, unsigned inverse, int shift) {
  return static_cast<int>((2ull * static_cast<unsigned>(x) * inverse >> 32) >> shift);
}

// The page table (block table) of one sequence: the page with the n-th id holds its rows from n * page_rows on. The ids
// are not trusted: whatever they are, a page found here is one of the array, which has at least one. kPlain: the host
// has checked that ids have 32 bits and that pages have a power of two of rows.
template <bool kPlain = false>
struct PageTable {
  const void* ids;
  int64 stride;      // in ids
  int64 page_count;  // of the array
  int last_entry;    // the index of the last id that may be read
  int page_rows;     // rows of a page
  // For quotient() by page_rows. Where that is a power of two, shift is its logarithm.
  unsigned inverse;
  int shift;
  bool is_64bit;

  DEVICE int page_of_row(int row) const { return kPlain ? row >> shift : quotient(row, inverse, shift); }
  // The index of the id of a row's page, among the ids of the sequence.
  DEVICE int entry(int row) const {
    const int page = page_of_row(row);
    return page < last_entry ? page : last_entry;
  }
  // An id as loaded from memory. Nothing waits for the load before page_of() asks which page it is.
  struct Id {
    unsigned low, high;  // high: of ids with 64 bits
  };
  DEVICE Id id(int entry) const {
    const unsigned* const at = static_cast<const unsigned*>(ids) + entry * stride * (is_wide() ? 2 : 1);
    Id id{at[0], 0};
    if (is_wide()) id.high = at[1];
    return id;
  }
  DEVICE int64 page_of(const Id& x) const {
    const int64 id = is_wide() ? static_cast<int64>(x.high) << 32 | x.low : static_cast<int>(x.low);
    return id < 0 ? 0 : (id < page_count ? id : page_count - 1);
  }
  DEVICE int64 page(int entry) const {
    const int64 at = entry * stride;
    const int64 id = is_wide() ? static_cast<const int64*>(ids)[at] : static_cast<const int*>(ids)[at];
    return id < 0 ? 0 : (id < page_count ? id : page_count - 1);
  }

 private:
  DEVICE bool is_wide() const { return !kPlain && is_64bit; }
};

// Rows in pages. Strides are in elements: between pages, and between the rows of a page.
template <class T>
struct PagedRows {
  T* first;  // where the first row of the first page of the array is
  int64 page_stride, stride;
  PageTable<> table;
  int row;

  // A row behind the last real one has no valid address: it must not be read.
  DEVICE T* address() const {
    const int entry = table.entry(row);
    return first + table.page(entry) * page_stride + (row - entry * table.page_rows) * stride;
  }
  DEVICE PagedRows from(int n) const { return {first, page_stride, stride, table, row + n}; }
  DEVICE PagedRows shifted(int64 elements) const { return {first + elements, page_stride, stride, table, row}; }
};
