// What the half of the waves that owns dv hands to the half that owns dk, of each element of a tile: its weight, which
// is the probability times the derivative of its score, and whether dropout drops it.
//
//   dS = weight * ((kept ? dP / (1 - dropout_p) : 0) + row_delta)
//
// The product with dout needs the probability rounded to the element type, and so does dS in the end. To round the
// weight in between makes the error of dq and dk 1.2 times as large. Where the rounded probability is an operand in
// registers, the weight goes over from lane to lane, as it is or as float16: no matrix store turns it round. Where the
// operand lies in shared memory, there is room for 16 bits of the weight beside it (docs/notes/portable-backward.md).
#pragma once

#include "attn/score_rule.cuh"
#include "target/target.cuh"
#include "tile/accumulator.cuh"
#include "tile/by_lanes.cuh"

// kOperandTile: whether the probabilities lie in shared memory as an operand already. kPitch: of all tiles.
template <class Element, bool kOperandTile, int kPitch>
struct Handover {
  using C = typename target::Mma<Element>::C;
  static constexpr bool k16Bit = sizeof(Element) == 2;
  // Whether a weight is other than its probability.
  static constexpr bool kSpecial = config::kDropout || ScoreRule::kHasDerivative;
  // All bits, in two tiles. A user's derivative may be of any size.
  static constexpr bool kWide = config::kExactWeights;
  static_assert(!kWide || k16Bit, "float32 is exact as it is");
  // As float16, which has digits enough for what becomes a bfloat16.
  static constexpr bool kNarrow = k16Bit && !kWide && (config::kUnitShift > 0 || kSpecial);
  static constexpr bool kByLanes = !kOperandTile;
  static_assert(!k16Bit || !kByLanes || kWide || kNarrow, "where no operand lies in shared memory, weights have tiles");
  // Whether weights are in tiles of their own; else they are the operand.
  static constexpr bool kOwnTile = kWide || kNarrow || kSpecial;
  static constexpr int kTiles = kWide ? 2 : 1;

  // A dropped weight is told by its sign, where a weight has none, or else by its last bit.
  DEVICE static float marked(float weight, bool kept) {
    if constexpr (kNarrow) return kept ? weight : -weight;
    return target::float_of((unsigned(target::bits_of(weight)) & ~1u) | unsigned(!kept));
  }
  DEVICE static bool is_kept(float weight) {
    const unsigned bits = target::bits_of(weight);
    return kNarrow ? bits >> 31 == 0 : (bits & 1u) == 0;
  }
  DEVICE static float unmarked(float weight) { return kNarrow ? fmaxf(weight, -weight) : weight; }

  // `second`: the other tile, where there are two.
  DEVICE static void store(const C& weights, Element* tile, Element* second, int lane) {
    if constexpr (kWide) {
      store_by_lanes(weights, tile, second, kPitch, lane);
    } else if constexpr (kNarrow && kByLanes) {
      store_pairs_by_lanes<target::Mma<float16>>(weights, tile, kPitch, lane);
    } else if constexpr (kNarrow) {
      store_accumulator<target::Mma<float16>>(weights, reinterpret_cast<float16*>(tile), kPitch, lane);
    } else {
      store_accumulator<target::Mma<Element>>(weights, tile, kPitch, lane);
    }
  }
  DEVICE static C load(const Element* tile, const Element* second, int lane) {
    if constexpr (kWide) {
      return load_by_lanes<C>(tile, second, kPitch, lane);
    } else if constexpr (kNarrow && kByLanes) {
      return load_pairs_by_lanes<target::Mma<float16>, C>(tile, kPitch, lane);
    } else if constexpr (kNarrow) {
      return load_accumulator<target::Mma<float16>, C>(reinterpret_cast<const float16*>(tile), kPitch, lane);
    } else {
      return load_accumulator<target::Mma<Element>, C>(tile, kPitch, lane);
    }
  }
};

// Where the waves meet when weights are handed over. Whoever owns dv reads nothing of the others' there, and need not
// wait: it says that its weights are written, and goes on. kArrivals 1: the half that owns dk waits for all of the
// other half. 2: each wave of it for the one with the same keys. 0: all wait for all. kColumnWaves is 1 but for 0.
template <int kArrivals, int kRoleWaves>
DEVICE void meet_for_weights(bool owns_dk, int wave) {
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
