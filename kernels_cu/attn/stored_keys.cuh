// Keys and values as their array holds them: in the type of queries, or in float8 with a factor for each kv head. Tiles
// of float8 stay so in shared memory, and become operands in registers. The factor of keys is part of the scale of
// scores (ScoreRule), that of values of the last division.
#pragma once

#include "attn/params.cuh"
#include "attn/score_rule.cuh"
#include "target/target.cuh"
#include "tile/shared_tile.cuh"

using StoredKey = Either<config::kFloat8, float8, config::Element>::Type;

// The operand of queries that goes with rows of such keys.
template <class M>
DEVICE typename M::A load_queries(const config::Element* tile, int pitch, int lane) {
  if constexpr (config::kFloat8) {
    return M::load_a_float8(tile, pitch, lane);
  } else {
    return M::load_a(tile, pitch, lane);
  }
}

// The column of a block of the output that a lane's element is in.
template <class C>
DEVICE int output_column(int lane, int e) {
  return config::kFloat8 ? column_of_float8(C::column(lane, e)) : C::column(lane, e);
}

// The factor of the values of a query head.
DEVICE float value_factor(const ForwardParams& p, int head) {
  if constexpr (config::kFloat8) return kv_factor(p.v_scale, p, head);
  return 1.0f;
}
