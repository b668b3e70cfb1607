// Lists of kept keys, for calls whose query rows share the keys they see (KeptKeys in attn/params.cuh): ascending, with
// -1 behind the last key. Entries are not trusted: none leads outside the arrays.
#pragma once

#include "attn/helper_params.cuh"
#include "target/target.cuh"

// The list of one head of one sequence.
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

  // The entry of a key, or -1, by binary search. Keys are compared as unsigned numbers, so that -1 is behind every key.
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

  // The number of entries before the first one that is no key.
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
