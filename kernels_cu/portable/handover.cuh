// What the half of the waves that owns dv hands to the half that owns dk through shared memory (portable/backward.cu):
// the weight of each element of a tile, which is its probability times the derivative of its score, and whether dropout
// drops the element.
//
//   dS = weight * ((kept ? dP / (1 - dropout_p) : 0) + row_delta)
//
// The product with dout takes the probability rounded to the element type, and dS is rounded in the end. To round the
// weight in between as well makes the error of dq and dk 1.2 times as large, so weights keep more digits than bfloat16
// has. Where the rounded probability is an operand in registers, the weight goes from lane to lane
// (tile/lane_to_lane.cuh), as float32 or as float16, and no matrix store rearranges it. Where that operand lies in
// shared memory, there is room for 16 bits of the weight beside it (docs/notes/portable-backward.md).
#pragma once

#include "attn/score_rule.cuh"
#include "target/target.cuh"
#include "tile/accumulator.cuh"
#include "tile/lane_to_lane.cuh"

// kOperandTile: whether the probabilities lie in shared memory as an operand already. kPitch: that of all tiles.
template <class Element, bool kOperandTile, int kPitch>
struct Handover {
  using C = typename target::Mma<Element>::C;
  static constexpr bool k16Bit = sizeof(Element) == 2;
  // Whether a weight may differ from its probability.
  static constexpr bool kDiffersFromP = config::kDropout || ScoreRule::kHasDerivative;
  // Weights keep all 32 bits, in two tiles. A user's derivative, for one, may be of any size.
  static constexpr bool kFloat32Weights = config::kExactWeights;
  static_assert(!kFloat32Weights || k16Bit, "float32 is exact as it is");
  // Weights are float16, which has digits enough for what becomes a bfloat16.
  static constexpr bool kFloat16Weights = k16Bit && !kFloat32Weights && (config::kUnitShift > 0 || kDiffersFromP);
  // Whether such weights go from lane to lane. Else they go by matrix stores and loads.
  static constexpr bool kLaneToLane = !kOperandTile;
  static_assert(!k16Bit || !kLaneToLane || kFloat32Weights || kFloat16Weights,
                "where no operand lies in shared memory, weights have tiles");
  // Whether weights have tiles of their own. Else the operand P serves as the weights.
  static constexpr bool kOwnTile = kFloat32Weights || kFloat16Weights || kDiffersFromP;
  static constexpr int kTiles = kFloat32Weights ? 2 : 1;

  // Marks the weight of a dropped element: by its sign where weights are never negative, else by its last bit.
  DEVICE static float marked(float weight, bool kept) {
    if constexpr (kFloat16Weights) return kept ? weight : -weight;
    return target::float_of((unsigned(target::bits_of(weight)) & ~1u) | unsigned(!kept));
  }
  DEVICE static bool is_kept(float weight) {
    const unsigned bits = target::bits_of(weight);
    return kFloat16Weights ? bits >> 31 == 0 : (bits & 1u) == 0;
  }
  DEVICE static float unmarked(float weight) {
    if constexpr (kFloat16Weights) return fmaxf(weight, -weight);
    return target::float_of(unsigned(target::bits_of(weight)) & ~1u);
  }

  // second: the other tile, where there are two.
  DEVICE static void store(const C& weights, Element* tile, Element* second, int lane) {
    if constexpr (kFloat32Weights) {
      store_lane_to_lane(weights, tile, second, kPitch, lane);
    } else if constexpr (kFloat16Weights && kLaneToLane) {
      store_lane_to_lane_16bit<target::Mma<float16>>(weights, tile, kPitch, lane);
    } else if constexpr (kFloat16Weights) {
      store_accumulator<target::Mma<float16>>(weights, reinterpret_cast<float16*>(tile), kPitch, lane);
    } else {
      store_accumulator<target::Mma<Element>>(weights, tile, kPitch, lane);
    }
  }
  DEVICE static C load(const Element* tile, const Element* second, int lane) {
    if constexpr (kFloat32Weights) {
      return load_lane_to_lane<C>(tile, second, kPitch, lane);
    } else if constexpr (kFloat16Weights && kLaneToLane) {
      return load_lane_to_lane_16bit<target::Mma<float16>, C>(tile, kPitch, lane);
    } else if constexpr (kFloat16Weights) {
      return load_accumulator<target::Mma<float16>, C>(reinterpret_cast<const float16*>(tile), kPitch, lane);
    } else {
      return load_accumulator<target::Mma<Element>, C>(tile, kPitch, lane);
    }
  }
};

// The barrier between the stores and the loads of weights. kArrivals 0: all waves wait for all. Else the half that owns
// dv, which reads nothing of the other half there, only announces that its weights are written and goes on. 1: the half
// that owns dk waits for all waves of the other half. 2: each of its waves waits for the wave with the same keys.
// kColumnWaves is 1 unless kArrivals is 0.
template <int kArrivals, int kRoleWaves>
DEVICE void sync_weights(bool owns_dk, int wave) {
  static_assert(kArrivals < 2 || kRoleWaves < 16, "hardware has 16 barriers, of which block_sync() takes one");
  constexpr int kThreads = (kArrivals == 2 ? 2 : 2 * kRoleWaves) * target::kWave;
  if constexpr (kArrivals == 0) {
    target::block_sync();
  } else if (owns_dk) {
    target::barrier_sync(kArrivals == 2 ? 1 + wave - kRoleWaves : 1, kThreads);
  } else {
    target::barrier_arrive(kArrivals == 2 ? 1 + wave : 1, kThreads);
  }
}
