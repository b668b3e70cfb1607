// Query tiles that have rows for one consumer alone, in Hopper's forward: all consumers of a block work on these rows,
// and each computes every kConsumers-th key tile.
//
// One consumer alone would wait for loads: its slots of keys and values are full again only some time after it has
// given them back. Of consumers that share key tiles each has slots of its own, and gives them back on behalf of all
// consumers. At the end the results of all consumers are merged through the memory of the queries.
#pragma once

#include "attn/exponent.cuh"
#include "sm90/forward_merge.cuh"
#include "sm90/forward_work.cuh"

namespace forward {

// The running maxima and the sums of the rows, of each consumer.
struct SharedRows {
  float running_max[kConsumers][64], sum[kConsumers][64];
};
// The output of a consumer. The quads of its lanes lie side by side.
struct SharedOutput {
  Quad out[2 * kOutBlocks][kWarpgroup];
};

// The first consumer must have the first query rows of all heads of a tile.
static_assert(!kSharesKeys || (kStages % kConsumers == 0 && kCluster == 1 && sizeof(SharedOutput) <= kQueryBytes &&
                               (kInterleaved || kHeadsPerTile == 1 || Rows::kQueryRowsOfConsumer < kTileQ)),
              "the host decides so (Config.shares_keys in rawattn/_kernels/sm90/forward_config.py)");
static_assert(sizeof(SharedRows) <= 64 * 128, "they lie in the rows of another consumer");
constexpr int kLeastSharedTiles = (kLeastSharedKeys + kTileK - 1) / kTileK;
static_assert(!kSharesKeys || kLeastSharedTiles >= kConsumers, "each consumer has a key tile");

// The named barrier at which all consumers meet.
constexpr int kAllConsumers = kTurn + kConsumers;

// Whether consumers share the key tiles of a piece of work. span: those tiles.
DEVICE bool shares_keys(const WorkTile& work, const TileSpan& span) {
  if constexpr (!kSharesKeys) return false;
  const int rows = work.q.length - first_query(work);
  const bool one_has_rows = kInterleaved ? rows * kHeadsPerTile <= 64 : rows <= Rows::kQueryRowsOfConsumer;
  return one_has_rows && span.count() >= kLeastSharedTiles;
}

// Merges the results of all consumers into that of consumer 0. softmax.sum_rows() must come before. queries: memory of
// the queries, which no product of this consumer reads any longer.
DEVICE void merge_consumers(unsigned char* queries, int index, int warp, int lane, C (&o)[1][kOutBlocks],
                            Softmax& softmax) {
  const auto meet = [] { ptx::barrier_sync(kAllConsumers, kConsumers * kWarpgroup); };
  // Behind the rows that other consumers' products may still read.
  SharedRows& rows = *reinterpret_cast<SharedRows*>(queries + 64 * 128);
  SharedOutput& output = *reinterpret_cast<SharedOutput*>(queries);
  auto &running_max = softmax.running_max[0], &sum = softmax.sum[0];
  UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
    const int row = warp * 16 + C::row(lane, slot);
    if (lane % 4 == 0) {
      rows.running_max[index][row] = running_max[slot];
      rows.sum[index][row] = sum[slot];
    }
  }
  meet();
  UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
    const int row = warp * 16 + C::row(lane, slot);
    const float own = running_max[slot];
    UNROLL for (int c = 0; c < kConsumers; c++) running_max[slot] = fmaxf(running_max[slot], rows.running_max[c][row]);
    softmax.rescale_factor[0][slot] = Exponent::power(own - softmax.shift(0, slot));
    sum[slot] = 0.0f;
    UNROLL for (int c = 0; c < kConsumers; c++) {
      sum[slot] += rows.sum[c][row] * Exponent::power(rows.running_max[c][row] - softmax.shift(0, slot));
    }
  }
  softmax.rescale(o);
  const int thread = warp * target::kWave + lane;
#pragma unroll 1
  for (int c = 1; c < kConsumers; c++) {
    meet();  // what was there before has been read
    if (index == c) {
      UNROLL for (int d = 0; d < kOutBlocks; d++) {
        const auto& x = o[0][d].x;
        output.out[2 * d][thread] = {x[0], x[1], x[2], x[3]};
        output.out[2 * d + 1][thread] = {x[4], x[5], x[6], x[7]};
      }
    }
    meet();
    if (index == 0) {
      UNROLL for (int d = 0; d < kOutBlocks; d++) {
        UNROLL for (int e = 0; e < C::kElements; e++) o[0][d].x[e] += output.out[2 * d + e / 4][thread].x[e % 4];
      }
    }
  }
  if constexpr (kInterleaved) {
    meet();
    clear_last_rows(queries, index * kWarpgroup + thread, kConsumers * kWarpgroup);
  }
  ptx::fence_async_proxy();  // TMA writes the next queries there
  target::wave_sync();       // one lane says that it may
}

}  // namespace forward
