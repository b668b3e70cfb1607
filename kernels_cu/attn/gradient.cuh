// What the backward's kernels share: which queries see a key tile, and what becomes of keys that they do not see.
#pragma once

#include "attn/params.cuh"
#include "attn/visible.cuh"
#include "target/target.cuh"

// The query tiles that see a key of a tile: count of them from `begin` on.
struct QueryRange {
  int begin, count;
};

template <int kTileQ, bool kLeft, bool kRight, bool kTopLeft, int kTileK>
DEVICE QueryRange queries_seeing(const VisibleKeys<kLeft, kRight, kTopLeft, kTileK>& visible, int tile, int len_q) {
  const int64 first_key = int64(tile) * kTileK;
  const int64 last_key = clamp(first_key + kTileK, 0, visible.len_k) - 1;
  int64 first = 0;
  int64 end = len_q;
  if constexpr (kRight) first = clamp(first_key - visible.offset - visible.right, 0, len_q);
  if constexpr (kLeft) {
    // Sink tokens are seen from every row below.
    if (first_key >= visible.sink) end = clamp(last_key - visible.offset + visible.left + 1, 0, len_q);
  }
  if (first >= end) return {0, 0};
  const int begin = static_cast<int>(first / kTileQ);
  return {begin, static_cast<int>((end + kTileQ - 1) / kTileQ) - begin};
}

// The probability of a score, anew. In float32 the difference is taken before the change to base 2: that keeps the
// digits which a large score and a large lse share, for one more instruction.
//
// An lse of -inf makes it inf: such a row sees no key, and what it does not see is replaced afterwards.
template <class T>
struct Probability {
  static constexpr float kLog2E = 1.4426950408889634f;
  static constexpr bool kNatural = sizeof(T) == 4;

  float scale;  // of the score

  DEVICE explicit Probability(float scale) : scale(kNatural ? scale : scale * kLog2E) {}
  DEVICE float operator()(float score, float lse) const {
    if constexpr (kNatural) return target::exp2(fmaf(score, scale, -lse) * kLog2E);
    return target::exp2(fmaf(score, scale, lse * -kLog2E));
  }
};
