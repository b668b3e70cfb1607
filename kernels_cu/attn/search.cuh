// The last of `count` numbers from 0 on for which something holds, where it holds for those up to it, 0 among them.
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

// The same by all lanes of a wave together: what they ask of memory is on its way at once.
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
