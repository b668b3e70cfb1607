// What the pipelines of Hopper's kernels are made of: warpgroups, rings of slots that TMA fills, and what
// of them stays in uniform registers.
#pragma once

#include "ptx/ptx.cuh"
#include "target/target.cuh"

namespace sm90 {

constexpr int kWarpgroup = 128;  // threads
constexpr int kColumns = 64;     // of a block in the 128-byte swizzle, of 16-bit elements

// This block's rank in its cluster.
template <int kCluster>
DEVICE int cluster_rank() {
  if constexpr (kCluster == 1) {
    return 0;
  } else {
    return ptx::cluster_rank();
  }
}

// Where one side stands in a ring of kSlots, whose barriers flip parity at each round.
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
};

// Nothing, or what TMA reads in the 128-byte swizzle.
template <int kCount>
struct SwizzledBytes {
  alignas(1024) unsigned char bytes[kCount];
};
template <>
struct SwizzledBytes<0> {};

// What went through a shuffle the compiler cannot compute anew: it stays in a uniform register. Else descriptors and
// addresses would be computed from the start of shared memory for every tile of keys, while products wait for them.
DEVICE unsigned make_uniform(unsigned x) { return static_cast<unsigned>(target::wave_uniform(static_cast<int>(x))); }
DEVICE unsigned long long make_uniform_descriptor(unsigned long long descriptor) {
  return descriptor >> 32 << 32 | make_uniform(static_cast<unsigned>(descriptor));
}
DEVICE unsigned long long make_uniform_descriptor(const void* shared, unsigned leading, unsigned eight_rows) {
  return make_uniform_descriptor(ptx::wgmma_descriptor(shared, leading, eight_rows));
}

}  // namespace sm90
