// Types of keys and values as they are stored: the dtype of queries, or float8 with a scale for each kv head. In
// the portable forward and in decoding, float8 tiles stay float8 in shared memory and are converted when they become
// operands in registers. (Hopper's forward converts them in shared memory: sm90/forward_float8.cuh.) The scale of keys
// is included in the scale of scores (ScoreRule), the scale of values in the final division of the output.
#pragma once

#include "attn/params.cuh"
#include "attn/score_rule.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"
#include "tile/either.cuh"
#include "tile/operand_tile.cuh"

using StoredKey = Either<config::kFloat8, float8, config::Element>::Type;

// The element type of the matrix products. Converting float8 to float16 takes a quarter of the instructions that
// bfloat16 takes. So with float8 keys, bfloat16 queries are first converted to float16, scaled by a power of two.
using Operand = Either<config::kFloat8 && sizeof(config::Element) == 2, float16, config::Element>::Type;
template <class T>
constexpr bool kIsFloat16 = false;
template <>
constexpr bool kIsFloat16<float16> = true;
constexpr bool kConvertsQueries = sizeof(config::Element) == 2 && kIsFloat16<Operand> && !kIsFloat16<config::Element>;

// A tile of bfloat16 queries in shared memory that become float16: kRows rows of kColumns elements, kPitch elements
// apart.
template <int kRows, int kColumns, int kPitch>
struct QueryTile {
  static constexpr int kPerRow = kColumns / 8;
  static constexpr int kChunks = kRows * kPerRow;
  config::Element* first;

  // The power of two to divide the queries by, as the exponent bits of a float: that of the largest magnitude, divided
  // by 2^14. All lanes of a wave get the same. Infinities and NaN are ignored. The power is at least 2^-64, so that
  // scales of scores remain normal numbers.
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

  // Divides the queries by that power of two and converts them in place. `threads` threads do so together, each with
  // its own number `thread`.
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

// The operand of queries for products with stored keys: float8 operands have the columns of q and k in another order.
template <class M>
DEVICE typename M::A load_queries(const Operand* tile, int pitch, int lane) {
  if constexpr (config::kFloat8) {
    return M::load_a_float8(tile, pitch, lane);
  } else {
    return M::load_a(tile, pitch, lane);
  }
}

// The column that a lane's element has in its block of 16 columns of the output: another one with float8 values.
template <class C>
DEVICE int output_column(int lane, int e) {
  return config::kFloat8 ? column_of_float8(C::column(lane, e)) : C::column(lane, e);
}

// The scale of the values for a query head; 1 unless they are float8.
DEVICE float value_factor(const ForwardParams& p, int head) {
  if constexpr (config::kFloat8) return kv_factor(p.v_scale, p, head);
  return 1.0f;
}
