// Stores accumulators to tiles of the element type in shared memory, and loads them back. Where an accumulator has the
// layout of an A operand (kAccumulatorFeedsA), it moves as such an operand, by matrix stores and loads.
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

// Turns an accumulator into the A operand that it feeds, kept in the accumulator's own first registers
// (M::stashed_operand() reads it). The operand then holds no registers of its own over the code that follows, even if
// another branch of that code has an accumulator in the same variable.
template <class M, class C>
DEVICE void become_operand(C& c) {
  if constexpr (M::kAccumulatorFeedsA) M::stash_operand(c, M::from_accumulator(c));
}
