// A ramp: what ALiBi, or the line of a score function, adds along the keys of a row, computed by the tensor cores in
// Hopper's forward. From one key of a tile to the next, a row's scores grow by the row's slope. So slope * j for key j
// of the tile is one more step of Q K^T, eight deep in tf32. A multiply-add for each score would take longer, since
// consumers are short of time for scores.
//
// A slope, in units of the products, is split into three numbers of 11 bits, the precision of tf32. A key's number j
// has no more bits than that:
//
//   slope * j = 2 * (high + middle + low) * (j / 2)
//
// Both operands have rows of 16 bytes: four columns, of which the last is 0. The depth of eight is these four columns
// twice, which is the factor of 2. What all keys of a row have in common is not in the ramp: it stays with the row's
// running maximum (attn/added_scores.cuh).
#pragma once

#include "attn/score_rule.cuh"
#include "ptx/ptx.cuh"
#include "sm90/forward_work.cuh"
#include "sm90/hidden_values.cuh"

namespace forward {

static_assert(!kRamp || kAlibi || ScoreRule::kLine, "a ramp along the keys");
static_assert(!kRamp || !(kScaleFirst || ScoreRule::kTransforms || kFloat8), "scores are products, but for the scale");

// For a ramp with two sides. is_beyond: for all rows of a consumer the key tile lies beyond the diagonal, or begins on
// it. is_before: for all rows it lies before the diagonal, or ends on it.
template <class OwnTiles>
DEVICE bool is_beyond(const OwnTiles& tiles, int n) {
  if constexpr (!kRamp || kRampSides == 1) return false;
  return tiles.first_key(n) >= tiles.first + Rows::kQueryRowsOfConsumer - 1 + tiles.visible.offset;
}
template <class OwnTiles>
DEVICE bool is_before(const OwnTiles& tiles, int n) {
  return tiles.first_key(n) + kTileK - 1 <= tiles.first + tiles.visible.offset;
}

// In a tile that the diagonal crosses, the product has added the rising ramp of keys before the diagonal to the keys
// beyond it as well. This corrects those to the falling ramp.
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

// The slopes of a consumer's rows in shared memory, and the product that adds the ramp. Nothing where there is no ramp.
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

  // Writes the numbers of keys, once. Called by all threads; a block barrier must follow.
  DEVICE static void write_keys(RampTile<true>& ramp) {
    for (int j = target::thread_index(); j < kTileK; j += kThreads) {
      const float half = 0.5f * static_cast<float>(j);
      ramp.keys[0][j] = {{half, half, half, 0.0f}};
      if constexpr (kRampSides == 2) ramp.keys[1][j] = {{-half, -half, -half, 0.0f}};
    }
    ptx::fence_async_proxy();
  }

  DEVICE Slopes(RampTile<true>& ramp, int index)
      : ramp(ramp),
        index(index),
        rows(make_uniform_descriptor(ptx::repeated_descriptor(ramp.rows[index]))),
        keys(make_uniform_descriptor(ptx::repeated_descriptor(ramp.keys))) {}

  // Writes the slopes for a query tile. lines_by_step: the lines of a score function are added as a ramp, which is
  // decided for all rows of the warp together (can_step_lines() in attn/added_scores.cuh).
  DEVICE void begin(const ScoreRule& rule, bool lines_by_step, int first_row, int warp, int lane) const {
    if (lane < 16) {
      float slope = 0.0f;
      if constexpr (kAlibi) slope = rule.slope;
      if constexpr (ScoreRule::kLine) slope = lines_by_step ? rule.step(first_row + lane) : 0.0f;
      slope *= target::reciprocal(rule.scale());
      const float high = leading(slope), middle = leading(slope - high);
      ramp.rows[index][warp * 16 + lane] = {{high, middle, slope - high - middle, 0.0f}};
    }
    // A warp's share of a product reads the warp's own 16 rows alone, and its earlier products are done. The barrier is
    // for what wgmma requires: the rows of all four warps are written when it is issued.
    ptx::fence_async_proxy();
    ptx::barrier_sync(kSharedWritten + index, kWarpgroup);
  }
  template <class Scores>
  DEVICE void add(Scores& scores, bool beyond) const {
    // In the units of a descriptor, 16 bytes: one for each key.
    const unsigned side = kRampSides == 2 && beyond ? kTileK : 0;
    ptx::WgmmaTf32<kTileK>::ss(scores, rows, keys + side);
  }

 private:
  // The leading 11 bits of x, as many as tf32 has.
  DEVICE static float leading(float x) { return target::float_of(target::bits_of(x) & 0xFFFFE000u); }
};

}  // namespace forward
