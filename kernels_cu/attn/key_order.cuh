// In which order a query tile of a forward meets its key tiles, where these are not given by lists
// (attn/listed_tiles.cuh).
#pragma once

#include "attn/tiles.cuh"
#include "target/target.cuh"

template <class Visible>
DEVICE constexpr TileOrder key_tile_order() {
  // Where no key beyond the diagonal is visible, ALiBi is largest at the diagonal. A line is largest at the last key if
  // it favours near keys, as most do.
  if (config::kOneSided || (config::kScoreMod && config::kModLine)) return TileOrder::kDown;
  const bool all = !Visible::kLimitedLeft && !Visible::kLimitedRight;
  return config::kAlibi && all ? TileOrder::kFromDiagonal : TileOrder::kUp;
}
