// Accumulators <-> tiles of the element type in shared memory, as operands where the machine's accumulators can be
// that.
#pragma once

#include "target/target.cuh"

template <class M, class T, class C>
DEVICE void store_accumulator(const C& c, T* tile, int pitch, int lane) {
  if constexpr (M::kAccumulatorFeedsA) {
    M::store_a(M::from_accumulator(c), tile, pitch, lane);
  } else {
    UNROLL for (int e = 0; e < C::kElements; e++) {
      tile[C::row(lane, C::slot(e)) * pitch + C::column(lane, e)] = target::from_float<T>(c.x[e]);
    }
  }
}

template <class M, class C, class T>
DEVICE C load_accumulator(const T* tile, int pitch, int lane) {
  if constexpr (M::kAccumulatorFeedsA) {
    return M::to_accumulator(M::load_a(tile, pitch, lane));
  } else {
    C c;
    UNROLL for (int e = 0; e < C::kElements; e++) {
      c.x[e] = target::to_float(tile[C::row(lane, C::slot(e)) * pitch + C::column(lane, e)]);
    }
    return c;
  }
}

// An accumulator becomes the operand that it feeds, in its own first registers: no other ones are then held over what
// follows, whatever else of the accumulator's type may be held there instead.
template <class M, class C>
DEVICE void become_operand(C& c) {
  if constexpr (M::kAccumulatorFeedsA) M::keep(c, M::from_accumulator(c));
}

// All bits of accumulators, in two tiles of 16-bit elements: 16 bytes a lane at a time, where a matrix store of a 16 x
// 16 block has the lane's row. Lanes of another wave with the same part of a product find their own elements there.
struct alignas(16) FourFloats {
  float x[4];
};
template <class T>
DEVICE T* lane_piece(T* tile, T* second, int pitch, int lane, int n) {
  const int piece = n * target::kWave + lane;
  return (piece < 32 ? tile : second) + piece % 16 * pitch + piece / 16 % 2 * 8;
}
template <class C, class T>
DEVICE void store_by_lanes(const C& c, T* tile, T* second, int pitch, int lane) {
  UNROLL for (int n = 0; n < C::kElements / 4; n++) {
    FourFloats four;
    UNROLL for (int i = 0; i < 4; i++) four.x[i] = c.x[4 * n + i];
    *reinterpret_cast<FourFloats*>(lane_piece(tile, second, pitch, lane, n)) = four;
  }
}
template <class C, class T>
DEVICE C load_by_lanes(const T* tile, const T* second, int pitch, int lane) {
  C c;
  UNROLL for (int n = 0; n < C::kElements / 4; n++) {
    const FourFloats four = *reinterpret_cast<const FourFloats*>(lane_piece(tile, second, pitch, lane, n));
    UNROLL for (int i = 0; i < 4; i++) c.x[4 * n + i] = four.x[i];
  }
  return c;
}
