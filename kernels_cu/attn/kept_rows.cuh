// Rows of kept keys, of all heads: what gathering and scattering share. A lane takes every kWave-th access of a row.
#pragma once

#include "attn/kept_keys.cuh"
#include "attn/rows.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

namespace kept_rows {

using namespace config;
using Access = Chunk<kCopyBytes>;

constexpr int kWaves = kThreads / target::kWave;
constexpr int kChunks = kRowBytes / kCopyBytes;  // of a head
constexpr int kPitch = round_up(kRowBytes, 16);
static_assert(kRowBytes % kCopyBytes == 0, "an access must not straddle the end of a row");

// The place of this wave among those of the launch.
DEVICE int64 wave_index() { return int64(target::block_index()) * kWaves + target::thread_index() / target::kWave; }

// Of the array of all keys, in bytes.
DEVICE int64 offset(const Strides& strides, int64 batch, int64 row, int head) {
  return (batch * strides.batch + row * strides.row + head * strides.head) * kElementBytes;
}

// from(head, byte): where an access is read, null for zeros; to(head, byte): where it is written.
template <class From, class To>
DEVICE void copy_row(int nheads, const From& from, const To& to) {
  // Several accesses at a time are under way: each one is small.
  constexpr int kAtOnce = 4;
  const int count = nheads * kChunks;
  for (int base = target::thread_index() % target::kWave; base < count; base += kAtOnce * target::kWave) {
    Access piece[kAtOnce];
    UNROLL for (int n = 0; n < kAtOnce; n++) {
      const int i = base + n * target::kWave;
      const void* const source = i < count ? from(i / kChunks, i % kChunks * kCopyBytes) : nullptr;
      piece[n] = source != nullptr ? *static_cast<const Access*>(source) : Access{};
    }
    UNROLL for (int n = 0; n < kAtOnce; n++) {
      const int i = base + n * target::kWave;
      if (i < count) *static_cast<Access*>(to(i / kChunks, i % kChunks * kCopyBytes)) = piece[n];
    }
  }
}

}  // namespace kept_rows
