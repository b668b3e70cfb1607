// Stores the output and the LSE of a consumer warp's 16 rows in Hopper's forward. The output leaves from registers, or
// through a buffer in shared memory by TMA.
#pragma once

#include "attn/row_alone.cuh"
#include "attn/rows.cuh"
#include "sm90/forward_work.cuh"
#include "tile/transpose.cuh"

namespace forward {

DEVICE unsigned output_pair(float low, float high) { return target::Mma<Element>::to_pair(low, high); }

// Stores 8 elements of a row, or the last `left` of it, by accesses of kStoreBytes: the widest that the output allows.
DEVICE void store_piece(Element* out, const unsigned (&piece)[4], int left) {
  if constexpr (kStoreBytes == 16) {
    if (left > 0) *reinterpret_cast<Chunk<16>*>(out) = {piece[0], piece[1], piece[2], piece[3]};
  } else {
    constexpr int kChunk = kStoreBytes / 2;
    UNROLL for (int i = 0; i < 8; i += kChunk) {
      if (i >= left) break;
      if constexpr (kStoreBytes == 8) {
        *reinterpret_cast<Chunk<8>*>(out + i) = {piece[i / 2], piece[i / 2 + 1]};
      } else if constexpr (kStoreBytes == 4) {
        *reinterpret_cast<Chunk<4>*>(out + i) = {piece[i / 2]};
      } else {
        *reinterpret_cast<Chunk<2>*>(out + i) = {static_cast<unsigned short>(piece[i / 2] >> i % 2 * 16)};
      }
    }
  }
}

DEVICE void store_lse(const ForwardParams& p, const WorkTile& work, const Softmax& softmax, int head, int first_row,
                      int lane) {
  if (p.lse == nullptr || lane % 4 != 0) return;
  float* const lse = p.lse + work.sequence * p.lse_batch + head * p.lse_head + work.q.start;
  UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
    const RowPlace at = place_of(work, head, first_row, C::row(lane, slot));
    if (at.real) lse[(at.head - head) * p.lse_head + at.row] = softmax.lse(0, slot);
  }
}

// Stores from registers, row by row. A quad of lanes holds 32 columns of a row, each lane 4 bytes of every 8 columns.
// After the exchange each lane holds 16 contiguous bytes.
template <int kBlocks>
DEVICE void store_rows(const ForwardParams& p, const WorkTile& work, const C (&o)[1][kBlocks], int first_block,
                       int head, int first_row, int lane) {
  unsigned pairs[C::kSlots][round_up(kBlocks, 2) * 2];
  UNROLL for (int d = 0; d < kBlocks; d++) {
    UNROLL for (int e = 0; e < C::kElements; e += 2) {
      pairs[C::slot(e)][2 * d + e / 4] = output_pair(o[0][d].x[e], o[0][d].x[e + 1]);
    }
  }
  UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
    const RowPlace at = place_of(work, head, first_row, C::row(lane, slot));
    const int first_column = first_block * 16 + lane % 4 * 8;
    Element* const out =
        row_at<Element>(p.out, p.out_strides, work.sequence, work.q.start + at.row, at.head) + first_column;
    UNROLL for (int d = 0; d < kBlocks * 2; d += 4) {
      unsigned piece[4] = {pairs[slot][d], pairs[slot][d + 1], pairs[slot][d + 2], pairs[slot][d + 3]};
      transpose_quad(piece, lane % 4);
      if (at.real) store_piece(out + d * 8, piece, kHeadDimV - (d * 8 + first_column));
    }
  }
}

// Stores by TMA, which clips at the sequence's end and at the head dim. The warp goes on with its next tile while TMA
// reads the buffer.
//
// The thread's index is read anew and the loop of stores is not unrolled. Otherwise the compiler would compute
// addresses before the loop over key tiles and keep them across it, in the uniform registers that the queries'
// descriptors need.
template <class OutMaps, class OutBuffer>
DEVICE void store_boxes(const Sm90ForwardParams& p, const OutMaps& maps, OutBuffer& outputs, const WorkTile& work,
                        const C (&o)[1][kOutBlocks]) {
  const int thread = target::reload_thread_index() - kWarpgroup;
  const int lane = thread % 32, warp_row = thread / 32 * 16;
  unsigned char* const rows = outputs.bytes + warp_row * 128;
  if (lane == 0) ptx::wait_stores_read();  // of this warp's previous tile
  target::wave_sync();
  UNROLL for (int d = 0; d < kOutBlocks; d++) {
    const auto& x = o[0][d].x;
    const unsigned pairs[4] = {output_pair(x[0], x[1]), output_pair(x[2], x[3]), output_pair(x[4], x[5]),
                               output_pair(x[6], x[7])};
    // In the 128-byte swizzle of the map.
    const int row = lane % 16, chunk = (d % 4 * 2 + lane / 16) ^ row % 8;
    target::stmatrix(rows + d / 4 * (kTileRows * 128) + row * 128 + chunk * 16, pairs);
  }
  ptx::fence_async_proxy();
  target::wave_sync();
  const TileRow own = tile_row(warp_row);
  const int first_row = first_query(work) + own.row;
  // A box must not lie wholly outside its map, as with loads (sm90/rows.cuh).
  if (lane == 0 && first_row < work.q.length) {
    const MapRows at = map_rows(work, work.q, p.row_bound_q);
#pragma unroll 1
    for (int b = 0; b < kBlocksV; b++) {
      ptx::store_tensor_5d(&maps.out, rows + b * (kTileRows * 128), b * kColumns, at.first + first_row,
                           work.head + own.head, at.outer, at.batch);
    }
    ptx::commit_stores();
  }
}

// A predicate for keys that a mask of keys drops (sm90/forward_key_mask.cuh).
DEVICE NoMoreHidden dropped_keys(const WorkTile&) { return {}; }
DEVICE auto dropped_keys(const MaskedTile& work) {
  return [&work](int key) { return key >= kMostMaskedKeys || (work.bits[key / 32] >> key % 32 & 1) == 0; };
}

// Computes the NaN columns of the warp's rows again (attn/row_alone.cuh).
DEVICE void rewrite_nan(const ForwardParams& p, const Item& work) {
  // Read anew, so that nothing that depends on it is computed before the loop over key tiles.
  const int thread = target::reload_thread_index() - kWarpgroup;
  if (kTensorStores && thread % 32 == 0) ptx::wait_stores();
  target::wave_sync();
  const TileRow own = tile_row(thread / 32 * 16);
  const int first_row = first_row_of(work, thread / 32 * 16, own);
#pragma unroll 1
  for (int n = 0; n < 16; n++) {
    const RowPlace at = place_of(work, work.head + own.head, first_row, n);
    if (!target::wave_any(at.real)) continue;
    Element* const out = row_at<Element>(p.out, p.out_strides, work.sequence, work.q.start + at.row, at.head);
    attend_alone(p, work.sequence, at.head, at.row, work.q, work.k, out, dropped_keys(work));
  }
}

// Stores the output and the LSE of the warp's 16 rows. kByTma: the output by TMA, for which there are a map and a
// buffer.
template <bool kByTma>
DEVICE void store(const Sm90ForwardParams& params, const Maps& maps, SharedMemory& s, const WorkTile& work,
                  const C (&o)[1][kOutBlocks], const Softmax& softmax, int head, int first_row, int lane) {
  if constexpr (kByTma) {
    store_boxes(params, maps, s.boxes, work, o);
  } else {
    store_rows(params.forward, work, o, 0, head, first_row, lane);
  }
  store_lse(params.forward, work, softmax, head, first_row, lane);
}

}  // namespace forward
