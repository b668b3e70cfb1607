// Loads and stores numbers whose dtype is a value of the call, not a constant of the kernel.
#pragma once

#include "target/target.cuh"

// kind: 0 is float32, 1 float16, 2 bfloat16. at: an index, in elements.
DEVICE float load_number(const void* data, int kind, int64 at) {
  if (kind == 0) return static_cast<const float*>(data)[at];
  if (kind == 1) return target::to_float(static_cast<const float16*>(data)[at]);
  return target::to_float(static_cast<const bfloat16*>(data)[at]);
}
DEVICE void store_number(void* data, int kind, int64 at, float x) {
  if (kind == 0) static_cast<float*>(data)[at] = x;
  if (kind == 1) static_cast<float16*>(data)[at] = target::from_float<float16>(x);
  if (kind == 2) static_cast<bfloat16*>(data)[at] = target::from_float<bfloat16>(x);
}
