// Hands accumulators through shared memory from one wave to another that owns the same part of a product: each lane
// reads what the lane of the same index has written, so no matrix store or load rearranges elements. A lane accesses 16
// bytes at a time, at the address of its row in a matrix store of a 16 x 16 block. store_lane_to_lane() keeps all bits
// and takes two tiles of 16-bit elements; store_lane_to_lane_16bit() rounds to 16 bits and takes one.
#pragma once

#include "target/target.cuh"

struct alignas(16) LanePiece {
  float x[4];
};
template <class T>
DEVICE T* address_of_piece(T* tile, T* second, int pitch, int lane, int n) {
  const int piece = n * target::kWave + lane;
  return (piece < 32 ? tile : second) + piece % 16 * pitch + piece / 16 % 2 * 8;
}
template <class C, class T>
DEVICE void store_lane_to_lane(const C& c, T* tile, T* second, int pitch, int lane) {
  UNROLL for (int n = 0; n < C::kElements / 4; n++) {
    LanePiece four;
    UNROLL for (int i = 0; i < 4; i++) four.x[i] = c.x[4 * n + i];
    *reinterpret_cast<LanePiece*>(address_of_piece(tile, second, pitch, lane, n)) = four;
  }
}
template <class C, class T>
DEVICE C load_lane_to_lane(const T* tile, const T* second, int pitch, int lane) {
  C c;
  UNROLL for (int n = 0; n < C::kElements / 4; n++) {
    const LanePiece four = *reinterpret_cast<const LanePiece*>(address_of_piece(tile, second, pitch, lane, n));
    UNROLL for (int i = 0; i < 4; i++) c.x[4 * n + i] = four.x[i];
  }
  return c;
}

// H: the Mma to whose element type they are rounded.
template <class H, class C, class T>
DEVICE void store_lane_to_lane_16bit(const C& c, T* tile, int pitch, int lane) {
  C pairs;
  H::stash_operand(pairs, H::from_accumulator(c));
  LanePiece four;
  UNROLL for (int i = 0; i < 4; i++) four.x[i] = pairs.x[i];
  *reinterpret_cast<LanePiece*>(tile + lane % 16 * pitch + lane / 16 * 8) = four;
}
template <class H, class C, class T>
DEVICE C load_lane_to_lane_16bit(const T* tile, int pitch, int lane) {
  const LanePiece four = *reinterpret_cast<const LanePiece*>(tile + lane % 16 * pitch + lane / 16 * 8);
  C pairs;
  UNROLL for (int i = 0; i < 4; i++) pairs.x[i] = four.x[i];
  return H::to_accumulator(H::stashed_operand(pairs));
}
