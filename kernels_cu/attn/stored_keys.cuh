// Keys and values as their array holds them: in the type of queries, or in float8 with a factor for each kv head. Tiles
// of float8 stay so in shared memory, and become operands in registers. The factor of keys is part of the scale of
// scores (ScoreRule), that of values of the last division.
#pragma once

#include "attn/params.cuh"
#include "attn/score_rule.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"
#include "tile/shared_tile.cuh"

using StoredKey = Either<config::kFloat8, float8, config::Element>::Type;

// What products are made of. float8 becomes float16 in a quarter of the instructions that bfloat16 takes, so queries in
// bfloat16 become float16 first, times a power of two.
using Operand = Either<config::kFloat8 && sizeof(config::Element) == 2, float16, config::Element>::Type;
template <class T>
constexpr bool kIsFloat16 = false;
template <>
constexpr bool kIsFloat16<float16> = true;
constexpr bool kConvertsQueries = sizeof(config::Element) == 2 && kIsFloat16<Operand> && !kIsFloat16<config::Element>;

// 16-bit queries in shared memory, kRows of them kPitch elements apart, each of kColumns.
template <int kRows, int kColumns, int kPitch>
struct QueryTile {
  static constexpr int kPerRow = kColumns / 8;
  static constexpr int kChunks = kRows * kPerRow;
  config::Element* first;

  // The power of two below their largest magnitude, over 2^14, as a float's exponent: told alike to all lanes of a
  // wave. Infinity and NaN do not count. No less than 2^-64, so that scales of scores remain normal numbers.
  DEVICE int exponent(int lane) const {
    unsigned largest = 0;
    for (int n = lane; n < kChunks; n += target::kWave) {
      const Chunk<16> chunk = *at(n);
      const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
      UNROLL for (int i = 0; i < 8; i++) {
        const unsigned own = words[i / 2] >> (i % 2 * 16 + 7) & 0xffu;
        if (own < 0xffu && own > largest) largest = own;
      }
    }
    UNROLL for (int mask = target::kWave / 2; mask > 0; mask /= 2) {
      const unsigned other = target::shuffle_xor(largest, mask);
      largest = other > largest ? other : largest;
    }
    const int found = static_cast<int>(largest) - 14;
    return found > 127 - 64 ? found : 127 - 64;
  }

  // They become float16 where they are, over that power.
  DEVICE void convert(int exponent, int thread, int threads) const {
    const float factor = target::float_of(static_cast<unsigned>(254 - exponent) << 23);
    for (int n = thread; n < kChunks; n += threads) {
      Chunk<16> chunk = *at(n);
      unsigned* const words = &chunk.x;
      UNROLL for (int i = 0; i < 4; i++) {
        const float low = target::float_of(words[i] << 16), high = target::float_of(words[i] & 0xffff0000u);
        words[i] = target::Mma<float16>::to_pair(low * factor, high * factor);
      }
      *at(n) = chunk;
    }
  }

 private:
  DEVICE Chunk<16>* at(int n) const {
    return reinterpret_cast<Chunk<16>*>(first + n / kPerRow * kPitch + n % kPerRow * 8);
  }
};

// The operand of queries that goes with rows of such keys.
template <class M>
DEVICE typename M::A load_queries(const Operand* tile, int pitch, int lane) {
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
