// Rows in Hopper's kernels: which head and query row each row of a query tile is, where a sequence's rows are in a
// tensor map, and the TMA loads of key and query tiles that follow from both.
#pragma once

#include "attn/sequence.cuh"
#include "ptx/ptx.cuh"
#include "sm90/pipeline.cuh"
#include "target/target.cuh"

namespace sm90 {

// A tile holds kTileQ query rows of each of kHeads neighbouring heads. A TileRow is the head and the query row that a
// row of the tile is, both counted from the tile's first.
//
// In TileRows a tile has kRunRows query rows of the first head, kRunRows of the second, and so on, then the next
// kRunRows rows of each head. The 64 rows of a consumer should be neighbours in every head. So a run is all kTileQ
// rows, unless a consumer would then have the end of one head and the beginning of another: then it is the 16 rows that
// a warp owns.
struct TileRow {
  int head, row;
};
template <int kTileRows, int kHeads>
struct TileRows {
  static constexpr int kTileQ = kTileRows / kHeads;
  static constexpr bool kInterleaved = false;
  static constexpr int kRunRows = kTileQ % 64 == 0 || 64 % kTileQ == 0 ? kTileQ : 16;
  static constexpr int kRunsOfHead = kTileQ / kRunRows;
  // Query rows of a head from the first to the last of a consumer.
  static constexpr int kQueryRowsOfConsumer = kTileQ % 64 == 0 ? 64 : kRunRows == kTileQ ? kTileQ : 64 / kHeads;
  static_assert(kTileQ * kHeads == kTileRows && kTileQ % 16 == 0, "a warp's 16 rows are those of one head");
  static_assert(kRunRows == kTileQ || 64 % (kRunRows * kHeads) == 0, "a consumer has as many rows of every head");

  DEVICE static TileRow at(int n) {
    if constexpr (kHeads == 1) {
      return {0, n};
    } else if constexpr (kRunsOfHead == 1) {
      return {n / kRunRows, n % kRunRows};
    } else {
      return {n / kRunRows % kHeads, n / (kRunRows * kHeads) * kRunRows + n % kRunRows};
    }
  }
};

// The same with interleaved heads: all heads of the first query, then all heads of the next. Any number of heads can
// share such a tile. Its last rows, fewer than kHeads, may belong to no query.
template <int kTileRows, int kHeads>
struct InterleavedRows {
  static constexpr int kTileQ = kTileRows / kHeads;
  static constexpr bool kInterleaved = true;
  static constexpr int kUsedRows = kTileQ * kHeads;  // rows that belong to a query
  // The most query rows that the 64 rows of a consumer can belong to.
  static constexpr int kQueryRowsOfConsumer = kTileRows == 64 ? kTileQ : 62 / kHeads + 2;

  DEVICE static TileRow at(int n) { return {n % kHeads, n / kHeads}; }
};

// Coordinates of a sequence's first row in a tensor map: on the row axis, on the second row axis, and on the batch
// axis.
//
// A ragged batch has one map for sequences of any length, and rows past a sequence's end must be out of its bounds. So
// each sequence is placed to end where the map's row axis ends, after `bound` rows. The map's origin lies `bound` rows
// before the array, and the coordinate on the second row axis leads from there to the sequence's rows (geometry() in
// rawattn/_kernels/sm90/forward_steps.py). kPacked: the array has no batch axis.
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

// Loads kRows rows of a head from row `row` of a sequence on, in kBlocks blocks of 64 columns. kSharers: blocks of a
// cluster that each load every kSharers-th block of columns and multicast it to all of them; the barrier of each waits
// for all columns. `row` must exist in the sequence: for a box that lies wholly outside its map, TMA touches the map's
// origin, and that of a ragged map is outside the array.
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

// Loads a query tile from query row `row` on, which must be one of the sequence's `length`. A box has one run of all
// heads, in 64 columns. Interleaved heads come in one box, by a map whose axis of heads comes before that of rows.
template <int kBlocks, class Rows, int kTileRows>
DEVICE void load_queries(unsigned char* shared, const ptx::TensorMap* map, ptx::Mbarrier* barrier, const MapRows& rows,
                         int row, int length, int head) {
  if constexpr (Rows::kInterleaved) {
    ptx::mbarrier_arrive_expect(barrier, kBlocks * Rows::kUsedRows * 128);
    UNROLL for (int b = 0; b < kBlocks; b++) {
      ptx::copy_tensor_5d<1>(shared + b * kTileRows * 128, map, barrier, b * kColumns, head, rows.first + row,
                             rows.outer, rows.batch);
    }
  } else if constexpr (Rows::kRunsOfHead == 1) {
    load_rows<kBlocks, kTileRows, 1>(shared, map, barrier, rows, row, head);
  } else {
    constexpr int kBoxBytes = kTileRows / Rows::kRunsOfHead * 128;
    ptx::mbarrier_arrive_expect(barrier, kBlocks * kTileRows * 128);
#pragma unroll 1
    for (int n = 0; n < Rows::kRunsOfHead; n++) {
      // A run that begins past the sequence's end would lie wholly outside the map. It is loaded from `row` instead,
      // and its results are not stored.
      const int own = row + n * Rows::kRunRows, at = rows.first + (own < length ? own : row);
      UNROLL for (int b = 0; b < kBlocks; b++) {
        ptx::copy_tensor_5d<1>(shared + b * kTileRows * 128 + n * kBoxBytes, map, barrier, b * kColumns, at, head,
                               rows.outer, rows.batch);
      }
    }
  }
}

}  // namespace sm90
