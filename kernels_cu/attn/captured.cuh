// Captured arrays: those that a score function or a mask's predicate reads. Indices are clamped to their axis, so
// nothing is read outside an array, wherever a tile ends.
#pragma once

#include "attn/params.cuh"
#include "attn/score_maths.cuh"
#include "target/target.cuh"

// An element as the generated code computes with it: a float, an int or a bool.
DEVICE float captured_value(float x) { return x; }
DEVICE float captured_value(float16 x) { return target::to_float(x); }
DEVICE float captured_value(bfloat16 x) { return target::to_float(x); }
DEVICE int captured_value(int x) { return x; }
DEVICE int captured_value(int64 x) { return score_maths::saturated(x); }
DEVICE bool captured_value(bool x) { return x; }

DEVICE int captured_index(const Captured& array, int axis, int index) {
  const int last = array.extents[axis] - 1;
  index = index < last ? index : last;
  return index > 0 ? index : 0;
}

// kWide: whether some step along an axis takes more than 2^31 bytes. Else an axis costs one multiply-add of the
// address.
template <class T, bool kWide, class... Indices>
DEVICE auto captured_at(const Captured& array, Indices... indices) {
  const int given[] = {indices...};
  const char* at = static_cast<const char*>(array.data);
  UNROLL for (int axis = 0; axis < int(sizeof...(Indices)); axis++) {
    const int64 index = captured_index(array, axis, given[axis]);
    const int64 stride = array.strides[axis];
    at += index * (kWide ? stride * int(sizeof(T)) : int(stride) * int(sizeof(T)));
  }
  return captured_value(*reinterpret_cast<const T*>(at));
}

// The index of an element in C order, whatever the array's strides are. Gradients are summed at this index.
template <class... Indices>
DEVICE int64 captured_number(const Captured& array, Indices... indices) {
  const int given[] = {indices...};
  int64 number = 0;
  UNROLL for (int axis = 0; axis < int(sizeof...(Indices)); axis++) {
    number = number * array.extents[axis] + captured_index(array, axis, given[axis]);
  }
  return number;
}

// A captured array as the generated code reads it: slope[head] or slope(head), table(q_idx, kv_idx).
template <class T, bool kWide>
struct CapturedArray {
  const Captured& array;

  template <class... Indices>
  DEVICE auto operator()(Indices... indices) const {
    return captured_at<T, kWide>(array, int(indices)...);
  }
  DEVICE auto operator[](int index) const { return captured_at<T, kWide>(array, index); }
};
