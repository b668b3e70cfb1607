// Rows of Hopper's kernels: of a tile that holds several heads, and of a sequence as tensor maps count them.
#pragma once

#include "attn/sequence.cuh"
#include "ptx/ptx.cuh"
#include "sm90/pipeline.cuh"
#include "target/target.cuh"

namespace sm90 {

// A row of a tile of kTileQ query rows of each of kHeads neighbouring heads: its head, counted from the tile's first,
// and its query row, likewise.
struct TileRow {
  int head, row;
};
template <int kTileQ, int kHeads>
DEVICE TileRow tile_row(int n) {
  if constexpr (kHeads == 1) {
    return {0, n};
  } else {
    return {n / kTileQ, n % kTileQ};
  }
}

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
// must be one of the sequence's: for a box that lies wholly outside its map, the copy engine touches the map's origin,
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

}  // namespace sm90
