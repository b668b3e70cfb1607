// The gradient of the bias by the main kernel of the backward (portable/backward.cu). It is dS of a tile, which lies in
// shared memory for dQ. Its rows are keys there, but queries in the bias, so matrix loads transpose it: a lane gets
// eight keys of a query. kDbias says where that goes:
//
//   1  An element of the bias belongs to one head's score or to those of a group's two heads, all in one block. The
//      first head's dS is stored, the second head's is added to it in memory; the sum of two is rounded once. Elements
//      that no query tile meets become 0.
//   2  More scores share an element. Blocks add to float32 sums in scratch memory, in rows padded to a multiple of 16
//      keys. Each 16 columns are in the order of dbias_sum_position().
//   3  As 1, but to such padded rows in the element type.
//
// portable/backward_bias_rows.cu clears the sums of 2, and copies what 2 and 3 leave to dbias.
#pragma once

#include "attn/params.cuh"
#include "attn/tiles.cuh"
#include "portable/gradient_unit.cuh"
#include "portable/dbias_sum_position.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

struct alignas(16) EightKeys {
  unsigned pairs[4];
};

// M: the Mma of dS. The tile of dS is [kTileK][kTileQ], with rows kPitch apart. kWaves: how many waves share it.
template <class M, class T, int kTileQ, int kTileK, int kPitch, int kWaves>
struct BiasGradientTile {
  static constexpr bool kWrites = config::kDbias != 2;       // elements are stored, not added to sums
  static constexpr bool kScratchRows = config::kDbias == 3;  // they are stored in scratch memory
  static constexpr int kThreads = kWaves * target::kWave;
  static constexpr int kKeys = 8;
  static constexpr int kPieces = kTileQ * kTileK / kKeys;
  // A matrix load reads keys of two queries side by side. At this distance the two are in different banks.
  static constexpr int kQueryDistance = kTileQ % 32 == 0 ? 16 : 8;
  static_assert(kPieces % target::kWave == 0 && sizeof(T) == 2, "all lanes have as many pieces of 16-bit elements");

  // Calls give(query, key, load) for each of a wave's pieces of eight keys; query and key are counted from the tile's
  // first ones. load(gradients) reads the piece from a tile of dS; all lanes of the wave must call it.
  template <class Give>
  DEVICE static void each(int wave, int lane, const Give& give) {
#pragma unroll 1
    for (int unit = wave; unit < kPieces / target::kWave; unit += kWaves) {
      if constexpr (M::kAccumulatorFeedsA) {
        // A unit has 16 keys of two runs of 8 queries, kQueryDistance apart.
        const int key = unit % (kTileK / 16) * 16, n = unit / (kTileK / 16);
        const int query = kQueryDistance == 16 ? n / 2 * 32 + n % 2 * 8 : n * 16;
        const auto load = [&](const T* gradients) {
          const T* const first = gradients + key * kPitch + query;
          const auto run = [&](int row, int column) {
            const int word = row / 8 + column / 8 * 2, pair = row % 8 / 2;
            return first + (pair % 2 * 8 + word * 2 + row % 2) * kPitch + pair / 2 * kQueryDistance;
          };
          const typename M::B b = M::load_b_columns_of(run, lane);
          EightKeys keys;
          static_assert(sizeof(b) == sizeof(keys), "an operand is eight elements");
          UNROLL for (int i = 0; i < 4; i++) keys.pairs[i] = M::pair(b, i);
          return keys;
        };
        give(query + lane % 4 / 2 * kQueryDistance + lane / 4, key + lane % 2 * 8, load);
      } else {
        const int piece = unit * target::kWave + lane;
        const int query = piece % kTileQ, key = piece / kTileQ * kKeys;
        const auto load = [&](const T* gradients) {
          const T* const first = gradients + key * kPitch + query;
          EightKeys keys;
          UNROLL for (int i = 0; i < 4; i++) {
            keys.pairs[i] = first[2 * i * kPitch].bits | unsigned(first[(2 * i + 1) * kPitch].bits) << 16;
          }
          return keys;
        };
        give(query, key, load);
      }
    }
  }

  // The i-th element, in natural units (portable/gradient_unit.cuh).
  DEVICE static float element(const EightKeys& keys, int i) {
    return kFromGradientUnit * target::to_float(T{static_cast<unsigned short>(keys.pairs[i / 2] >> i % 2 * 16)});
  }
  DEVICE static EightKeys sum(const EightKeys& a, const EightKeys& b) {
    EightKeys both;
    UNROLL for (int i = 0; i < 4; i++) {
      both.pairs[i] = M::to_pair(element(a, 2 * i) + element(b, 2 * i), element(a, 2 * i + 1) + element(b, 2 * i + 1));
    }
    return both;
  }
  // All eight elements, in natural units and rounded to T.
  DEVICE static EightKeys scaled(const EightKeys& keys) {
    EightKeys natural = keys;
    if constexpr (config::kUnitShift != 0) {
      UNROLL for (int i = 0; i < 4; i++) {
        natural.pairs[i] = M::to_pair(element(keys, 2 * i), element(keys, 2 * i + 1));
      }
    }
    return natural;
  }

  // Rows in scratch memory are read again soon, those of dbias are not.
  DEVICE static void put(T* at, const EightKeys& keys) {
    if constexpr (kScratchRows) {
      *reinterpret_cast<EightKeys*>(at) = keys;
    } else {
      target::store_streaming(at, keys.pairs);
    }
  }

  // Where the rows of a sequence and head begin, and how far apart they are.
  DEVICE static T* of_head(const BackwardParams& p, int sequence, int head) {
    const int own = head / p.forward.bias.group;
    if constexpr (kScratchRows) {
      T* const rows = static_cast<T*>(static_cast<void*>(p.dbias.partials));
      return rows + (int64(sequence) * p.dbias.heads + own) * p.forward.bias.rows * row_stride(p);
    }
    return static_cast<T*>(p.dbias.data) + sequence * p.dbias.batch + own * p.dbias.head;
  }
  DEVICE static int64 row_stride(const BackwardParams& p) {
    return kScratchRows ? round_up(p.forward.bias.keys, 16) : p.dbias.row;
  }

  // Writes 0 to those elements of a key tile, of one head, that no query tile of the span `met` meets.
  DEVICE static void clear(const BackwardParams& p, int sequence, int head, int first_key, const TileSpan& met,
                           int thread) {
    constexpr int kPerRow = kTileK / kKeys;
    const Bias& bias = p.forward.bias;
    const int key = first_key + thread % kPerRow * kKeys;
    if (key >= bias.keys) return;
    T* const to = of_head(p, sequence, head) + key;
    for (int row = thread / kPerRow; row < bias.rows; row += kThreads / kPerRow) {
      const int tile = row / kTileQ;
      if (tile < met.begin || tile >= met.end) put(to + row * row_stride(p), EightKeys{});
    }
  }

  // Gives out dS of a tile and head. With kPairs it is called for the second head of a pair: `gradients` is its dS,
  // `other` that of the first head.
  DEVICE static void give_out(const BackwardParams& p, int sequence, int head, int first_row, int first_key,
                              const T* gradients, [[maybe_unused]] const T* other, int wave, int lane) {
    const Bias& bias = p.forward.bias;
    if constexpr (config::kDbias == 2) {
      const int entry = (p.dbias.batches > 1 ? sequence : 0) * p.dbias.heads + head / bias.group;
      const int64 pitch = round_up(bias.keys, 16);
      float* const sums = p.dbias.partials + (int64(entry) * bias.rows + first_row) * pitch + first_key;
      each(wave, lane, [&](int query, int key, const auto& load) {
        const EightKeys keys = load(gradients);
        EightKeys others;
        if constexpr (config::kPairs) others = load(other);
        if (first_row + query >= bias.rows || first_key + key >= bias.keys) return;
        UNROLL for (int half = 0; half < 2; half++) {
          float run[4];
          UNROLL for (int i = 0; i < 4; i++) {
            run[i] = element(keys, half * 4 + i);
            if constexpr (config::kPairs) run[i] += element(others, half * 4 + i);
          }
          target::atomic_add(sums + query * pitch + key / 16 * 16 + dbias_sum_position(key % 16 + half * 4), run);
        }
      });
    } else {
      T* const to = of_head(p, sequence, head) + first_row * row_stride(p) + first_key;
      [[maybe_unused]] const bool first = head % bias.group == 0;
      each(wave, lane, [&](int query, int key, const auto& load) {
        const EightKeys keys = load(gradients);
        EightKeys others;
        if constexpr (config::kPairs) others = load(other);
        if (first_row + query >= bias.rows || first_key + key >= bias.keys) return;
        T* const at = to + query * row_stride(p) + key;
        if constexpr (config::kPairs) {
          put(at, sum(keys, others));
        } else if (first) {
          put(at, scaled(keys));
        } else {
          target::add_pairs(at, scaled(keys).pairs);
        }
      });
    }
  }
};
