// In which order a forward's query tile meets its keys, where those are not in a list.
#pragma once

#include "attn/tiles.cuh"
#include "target/target.cuh"

template <class Visible>
DEVICE constexpr TileOrder order_of_keys() {
  // Up to the diagonal what adds to scores has its largest there, and a line on the last key, where it rewards what is
  // near, as most do.
  if (config::kOneSided || (config::kScoreMod && config::kModLine)) return TileOrder::kDown;
  const bool all = !Visible::kLimitedLeft && !Visible::kLimitedRight;
  return config::kAlibi && all ? TileOrder::kFromDiagonal : TileOrder::kUp;
}
