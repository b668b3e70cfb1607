// A callback that does nothing: the default for functions that tell a `visit` or `hidden` of each element they handle
// (attn/scores.cuh, attn/mask_bits.cuh).
#pragma once

#include "target/target.cuh"

struct NoCallback {
  template <class... T>
  DEVICE void operator()(const T&...) const {}
};
