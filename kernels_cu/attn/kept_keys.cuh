// Lists of the keys that all rows share, ascending, -1 behind the last one. What a list holds is not trusted: no entry
// leads outside of the arrays.
#pragma once

#include "attn/params.cuh"
#include "target/target.cuh"

// Of one head of one sequence.
struct KeptList {
  const int* entries;
  int count, rows;

  DEVICE KeptList(const KeptKeys& kept, int64 batch, int head)
      : entries(kept.data + batch * kept.batch + head * kept.head), count(kept.count), rows(kept.rows) {}

  // The key of an entry, or -1.
  DEVICE int key(int entry) const {
    const int found = entries[entry];
    return unsigned(found) < unsigned(rows) ? found : -1;
  }

  // The entry of a key, or -1. As an unsigned number -1 is behind every key.
  DEVICE int entry(int key) const {
    int first = 0, last = count;
    while (first < last) {
      const int middle = first + (last - first) / 2;
      if (unsigned(entries[middle]) < unsigned(key)) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return first < count && entries[first] == key ? first : -1;
  }

  // The entries before the first one that is no key.
  DEVICE int length() const {
    int first = 0, last = count;
    while (first < last) {
      const int middle = first + (last - first) / 2;
      if (key(middle) >= 0) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return first;
  }
};
