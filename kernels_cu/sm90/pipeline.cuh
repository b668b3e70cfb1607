// Building blocks for the pipelines of Hopper's kernels: positions in rings of shared-memory slots that a producer
// fills and consumers empty, and helpers that keep descriptors and addresses in uniform registers.
#pragma once

#include "ptx/ptx.cuh"
#include "target/target.cuh"

namespace sm90 {

constexpr int kWarpgroup = 128;  // threads
constexpr int kColumns = 64;     // columns of a block in the 128-byte swizzle, of 16-bit elements

// This block's rank in its cluster.
template <int kCluster>
DEVICE int cluster_rank() {
  if constexpr (kCluster == 1) {
    return 0;
  } else {
    return ptx::cluster_rank();
  }
}

// The position of a producer or a consumer in a ring of kSlots. parity: of the mbarrier phase of this round, which
// flips when the ring wraps around.
template <int kSlots>
struct Ring {
  int slot = 0;
  unsigned parity = 0;
  DEVICE void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
  // Move by several slots, at most kSlots.
  DEVICE void advance_by(int slots) {
    slot += slots;
    if (slot >= kSlots) {
      slot -= kSlots;
      parity ^= 1;
    }
  }
  // Move by any number of slots.
  DEVICE void skip(int slots) {
    const int rounds = (slot + slots) / kSlots;
    slot += slots - rounds * kSlots;
    parity ^= rounds & 1;
  }
  DEVICE void retreat_by(int slots) {
    slot -= slots;
    if (slot < 0) {
      slot += kSlots;
      parity ^= 1;
    }
  }
};

// kCount bytes at an address that the 128-byte swizzle of TMA allows; no member for 0.
template <int kCount>
struct SwizzledBytes {
  alignas(1024) unsigned char bytes[kCount];
};
template <>
struct SwizzledBytes<0> {};

// The compiler cannot recompute a value that went through a shuffle, so it keeps the value in a uniform register.
// Otherwise it would compute descriptors and addresses from the start of shared memory for every key tile, while
// products wait for them.
DEVICE unsigned make_uniform(unsigned x) { return static_cast<unsigned>(target::wave_uniform(static_cast<int>(x))); }
DEVICE unsigned long long make_uniform_descriptor(unsigned long long descriptor) {
  return descriptor >> 32 << 32 | make_uniform(static_cast<unsigned>(descriptor));
}
DEVICE unsigned long long make_uniform_descriptor(const void* shared, unsigned leading, unsigned eight_rows) {
  return make_uniform_descriptor(ptx::wgmma_descriptor(shared, leading, eight_rows));
}

}  // namespace sm90
