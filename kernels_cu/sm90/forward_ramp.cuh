// What grows evenly along the keys of a row, made by the tensor cores: of a tile's keys 0, 1, 2 ... a row's score grows
// by its slope each, which is one more step of Q K^T, eight deep in tf32. A multiply-add of each score would take more,
// since scores are what Hopper's consumers are short of time for.
//
// A slope in the products' units is the sum of three numbers of 11 bits, and a key's number j has no more:
//
//   slope * j = 2 * (high + middle + low) * (j / 2)
//
// The depth of eight is twice the same four columns, of which the last one is 0: both operands have rows of 16 bytes.
// What a row has in common stays with its running maximum (attn/added_scores.cuh).
#pragma once

#include "attn/score_rule.cuh"
#include "ptx/ptx.cuh"
#include "sm90/forward_block.cuh"
#include "sm90/hidden_values.cuh"

namespace forward {

static_assert(!kRamp || kAlibi || ScoreRule::kLine, "a ramp along the keys");
static_assert(!kRamp || !(kScaleFirst || ScoreRule::kRemakes || kFloat8), "scores are products, but for the scale");

// Whether a key tile is wholly behind the diagonal, or begins on it, for all rows of a consumer; or wholly before it.
template <class OwnTiles>
DEVICE bool is_beyond(const OwnTiles& tiles, int n) {
  if constexpr (!kRamp || kRampSides == 1) return false;
  return tiles.first_key(n) >= tiles.first + Rows::kOfConsumer - 1 + tiles.visible.offset;
}
template <class OwnTiles>
DEVICE bool is_before(const OwnTiles& tiles, int n) {
  return tiles.first_key(n) + kTileK - 1 <= tiles.first + tiles.visible.offset;
}

// Where the diagonal crosses a tile, the ramp of the keys before it went on beyond: there it becomes the falling one.
template <class OwnTiles>
DEVICE void fold_ramp(C (&scores)[1][kKeyBlocks], const ScoreRule& rule, const OwnTiles& tiles, int n, int first_row,
                      int lane) {
  if constexpr (kRamp && kRampSides == 2) {
    if (is_before(tiles, n) || is_beyond(tiles, n)) return;
    const float twice = -2.0f * rule.slope * target::reciprocal(rule.scale());
    UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
      const int own_key = first_row + C::row(lane, slot) + rule.offset;
      const float first = static_cast<float>(tiles.first_key(n) + C::column(lane, 0) - own_key);
      UNROLL for (int b = 0; b < kKeyBlocks; b++) {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          if (C::slot(e) != slot) continue;
          const float beyond = first + static_cast<float>(b * 16 + C::column(0, e));
          scores[0][b].x[e] = fmaf(twice, fmaxf(beyond, 0.0f), scores[0][b].x[e]);
        }
      }
    }
  }
}

// A consumer's slopes.
template <bool kUsed>
struct Slopes {
  DEVICE static void write_keys(const RampTile<false>&) {}
  DEVICE Slopes(const RampTile<false>&, int) {}
  DEVICE void begin(const ScoreRule&, bool, int, int, int) const {}
  template <class Scores>
  DEVICE void add(Scores&, bool) const {}
};
template <>
struct Slopes<true> {
  RampTile<true>& ramp;
  const int index;
  const unsigned long long rows, keys;  // descriptors

  // By all threads, once. A barrier follows.
  DEVICE static void write_keys(RampTile<true>& ramp) {
    for (int j = target::thread_index(); j < kTileK; j += kThreads) {
      const float half = 0.5f * static_cast<float>(j);
      ramp.keys[0][j] = {{half, half, half, 0.0f}};
      if constexpr (kRampSides == 2) ramp.keys[1][j] = {{-half, -half, -half, 0.0f}};
    }
    ptx::fence_copies();
  }

  DEVICE Slopes(RampTile<true>& ramp, int index)
      : ramp(ramp),
        index(index),
        rows(make_uniform_descriptor(ptx::repeated_descriptor(ramp.rows[index]))),
        keys(make_uniform_descriptor(ptx::repeated_descriptor(ramp.keys))) {}

  // Of a query tile. straight: what is added to rows is a line, for all of the wave.
  DEVICE void begin(const ScoreRule& rule, bool straight, int first_row, int warp, int lane) const {
    if (lane < 16) {
      float slope = 0.0f;
      if constexpr (kAlibi) slope = rule.slope;
      if constexpr (ScoreRule::kLine) slope = straight ? rule.step(first_row + lane) : 0.0f;
      slope *= target::reciprocal(rule.scale());
      const float high = leading(slope), middle = leading(slope - high);
      ramp.rows[index][warp * 16 + lane] = {{high, middle, slope - high - middle, 0.0f}};
    }
    // A warp multiplies its own 16 rows, which it is done with. The barrier is for what the instruction promises: rows
    // of all four warps are there.
    ptx::fence_copies();
    ptx::barrier_sync(kCleaned + index, kWarpgroup);
  }
  template <class Scores>
  DEVICE void add(Scores& scores, bool beyond) const {
    // In units of a descriptor, of 16 bytes.
    const unsigned side = kRampSides == 2 && beyond ? kTileK : 0;
    ptx::WgmmaTf32<kTileK>::ss(scores, rows, keys + side);
  }

 private:
  // As tf32 has it.
  DEVICE static float leading(float x) { return target::float_of(target::bits_of(x) & 0xFFFFE000u); }
};

}  // namespace forward
