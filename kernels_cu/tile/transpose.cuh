// A 4 x 4 transpose among the four lanes of a quad: afterwards lane t holds, in order, what lanes 0 to 3 held in x[t].
#pragma once

#include "target/target.cuh"

DEVICE void transpose_quad(unsigned (&x)[4], int t) {
  // Two rounds. Each lane exchanges with the lane 1 away, then with the lane 2 away, the half of its elements that
  // belongs there.
  UNROLL for (int distance = 1; distance <= 2; distance *= 2) {
    const bool high = t & distance;
    UNROLL for (int i = 0; i < 4; i++) {
      if (i & distance) continue;
      unsigned& low_one = x[i];
      unsigned& high_one = x[i + distance];
      const unsigned received = target::shuffle_xor(high ? low_one : high_one, distance);
      if (high) {
        low_one = received;
      } else {
        high_one = received;
      }
    }
  }
}
