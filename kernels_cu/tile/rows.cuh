// Where rows lie in global memory. What copies rows asks for no more than these members, so that rows which lie in
// another way (in pages) need another type, not another copy.
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
  // The same rows of another head, or from another column on: so many elements further.
  DEVICE StridedRows shifted(int64 elements) const { return {first + elements, stride}; }
};
