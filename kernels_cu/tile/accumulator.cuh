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

// All bits of an accumulator, in two tiles of 16-bit words.
template <class M, class T, class C>
DEVICE void store_halves(const C& c, T* upper, T* lower, int pitch, int lane) {
  if constexpr (M::kAccumulatorFeedsA) {
    M::store_a(M::upper_halves(c), upper, pitch, lane);
    M::store_a(M::lower_halves(c), lower, pitch, lane);
  } else {
    UNROLL for (int e = 0; e < C::kElements; e++) {
      const int at = C::row(lane, C::slot(e)) * pitch + C::column(lane, e);
      const unsigned bits = target::bits_of(c.x[e]);
      upper[at] = T{static_cast<unsigned short>(bits >> 16)};
      lower[at] = T{static_cast<unsigned short>(bits)};
    }
  }
}

template <class M, class C, class T>
DEVICE C load_halves(const T* upper, const T* lower, int pitch, int lane) {
  if constexpr (M::kAccumulatorFeedsA) {
    return M::from_halves(M::load_a(upper, pitch, lane), M::load_a(lower, pitch, lane));
  } else {
    C c;
    UNROLL for (int e = 0; e < C::kElements; e++) {
      const int at = C::row(lane, C::slot(e)) * pitch + C::column(lane, e);
      c.x[e] = target::float_of(static_cast<unsigned>(upper[at].bits) << 16 | lower[at].bits);
    }
    return c;
  }
}
