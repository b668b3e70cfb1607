// Rows of Hopper's kernels: of a tile that holds several heads, and of a sequence as tensor maps count them.
#pragma once

#include "attn/sequence.cuh"
#include "ptx/ptx.cuh"
#include "sm90/pipeline.cuh"
#include "target/target.cuh"

namespace sm90 {

// A row of a tile of kTileQ query rows of each of kHeads neighbouring heads: its head, counted from the tile's first,
// and its query row, likewise.
//
// One head comes after the other, kRun query rows of each, and then the next kRun. A consumer's 64 rows are to be
// neighbours in every head: where whole heads would be cut between consumers, a run is what a warp owns.
struct TileRow {
  int head, row;
};
template <int kTileRows, int kHeads>
struct TileRows {
  static constexpr int kTileQ = kTileRows / kHeads;
  static constexpr bool kInterleaved = false;
  static constexpr int kRun = kTileQ % 64 == 0 || 64 % kTileQ == 0 ? kTileQ : 16;
  static constexpr int kRuns = kTileQ / kRun;
  // Query rows of a consumer, from its first to its last.
  static constexpr int kOfConsumer = kTileQ % 64 == 0 ? 64 : kRun == kTileQ ? kTileQ : 64 / kHeads;
  static_assert(kTileQ * kHeads == kTileRows && kTileQ % 16 == 0, "a warp's 16 rows are those of one head");
  static_assert(kRun == kTileQ || 64 % (kRun * kHeads) == 0, "a consumer has as many rows of every head");

  DEVICE static TileRow at(int n) {
    if constexpr (kHeads == 1) {
      return {0, n};
    } else if constexpr (kRuns == 1) {
      return {n / kRun, n % kRun};
    } else {
      return {n / kRun % kHeads, n / (kRun * kHeads) * kRun + n % kRun};
    }
  }
};

// The same where heads are interleaved: query by query, head by head. So heads of any number share a tile, and the last
// rows of one, fewer than heads, are nobody's.
template <int kTileRows, int kHeads>
struct InterleavedRows {
  static constexpr int kTileQ = kTileRows / kHeads;
  static constexpr bool kInterleaved = true;
  static constexpr int kReal = kTileQ * kHeads;
  // The most that 64 rows are of.
  static constexpr int kOfConsumer = kTileRows == 64 ? kTileQ : 62 / kHeads + 2;

  DEVICE static TileRow at(int n) { return {n % kHeads, n / kHeads}; }
};

// Coordinates of a sequence's rows in a tensor map. A ragged map has a row axis that ends where the sequence does,
// whatever its length: the map's origin lies `bound` rows before the array, and a second row axis brings it back (see
// rawattn/_kernels). kPacked: the array has no batch axis.
struct MapRows {
  int first, outer, batch;
};
template <bool kRagged, bool kPacked>
DEVICE MapRows map_rows(int sequence, const Span& span, int bound) {
  if constexpr (kRagged) {
    return {bound - span.length, static_cast<int>(span.start) + span.length, kPacked ? 0 : sequence};
  } else {
    return {0, 0, sequence};
  }
}

// kSharers: blocks that take turns at copying columns to all of them; every one's barrier waits for the whole. `row`
// must be one of the sequence's: for a box that lies wholly outside its map, TMA touches the map's origin,
// which is no memory of ours where the map is ragged.
template <int kBlocks, int kRows, int kSharers>
DEVICE void load_rows(unsigned char* shared, const ptx::TensorMap* map, ptx::Mbarrier* barrier, const MapRows& rows,
                      int row, int head) {
  ptx::mbarrier_arrive_expect(barrier, kBlocks * kRows * 128);
  UNROLL for (int b = 0; b < kBlocks; b++) {
    if (kSharers > 1 && b % kSharers != cluster_rank<kSharers>()) continue;
    ptx::copy_tensor_5d<kSharers>(shared + b * kRows * 128, map, barrier, b * kColumns, rows.first + row, head,
                                  rows.outer, rows.batch);
  }
}

// The rows of a tile from query row `row` on, which is one of the sequence's `length`: a box of all heads for each run.
// Interleaved ones are one box, of a map whose heads come before its rows.
template <int kBlocks, class Rows, int kTileRows>
DEVICE void load_queries(unsigned char* shared, const ptx::TensorMap* map, ptx::Mbarrier* barrier, const MapRows& rows,
                         int row, int length, int head) {
  if constexpr (Rows::kInterleaved) {
    ptx::mbarrier_arrive_expect(barrier, kBlocks * Rows::kReal * 128);
    UNROLL for (int b = 0; b < kBlocks; b++) {
      ptx::copy_tensor_5d<1>(shared + b * kTileRows * 128, map, barrier, b * kColumns, head, rows.first + row,
                             rows.outer, rows.batch);
    }
  } else if constexpr (Rows::kRuns == 1) {
    load_rows<kBlocks, kTileRows, 1>(shared, map, barrier, rows, row, head);
  } else {
    constexpr int kBoxBytes = kTileRows / Rows::kRuns * 128;
    ptx::mbarrier_arrive_expect(barrier, kBlocks * kTileRows * 128);
#pragma unroll 1
    for (int n = 0; n < Rows::kRuns; n++) {
      // Behind the sequence's end any of its rows do: nobody reads what comes of them.
      const int own = row + n * Rows::kRun, at = rows.first + (own < length ? own : row);
      UNROLL for (int b = 0; b < kBlocks; b++) {
        ptx::copy_tensor_5d<1>(shared + b * kTileRows * 128 + n * kBoxBytes, map, barrier, b * kColumns, at, head,
                               rows.outer, rows.batch);
      }
    }
  }
}

}  // namespace sm90
