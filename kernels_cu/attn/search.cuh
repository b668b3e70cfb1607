// Binary search: the largest n in [0, count) for which holds(n) is true. It must be true for 0, and for all numbers up
// to that one.
#pragma once

#include "target/target.cuh"

template <class Holds>
DEVICE int last_of(int count, const Holds& holds) {
  int low = 0;
  int high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (holds(middle)) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The same by all lanes of a wave together. Each tests a number at the same time, so their loads are in flight
// together.
template <class Holds>
DEVICE int last_by_wave(int count, const Holds& holds) {
  int low = 0;
  while (count > 1) {
    const int step = (count + target::kWave - 1) / target::kWave;
    const int own = target::thread_index() % target::kWave * step;
    const int held = target::wave_count(own < count && holds(low + own));
    const int skipped = held > 0 ? (held - 1) * step : 0;
    low += skipped;
    count = step < count - skipped ? step : count - skipped;
  }
  return low;
}
