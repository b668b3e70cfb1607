// Integers of the host in a kernel's own parameters, where they are few: no launch before it has to bring them to
// memory, and none of that memory has to be allocated. A kernel of its own, since so many bytes of parameters take 0.15
// us, and to look where integers are 0.1.
#pragma once

#include "attn/params.cuh"
#include "target/target.cuh"

// Where a parameter says that integers lie at an address below kEnd, they are carried: at that distance behind kBegin.
// No memory lies there.
template <int kWords>
struct CarriedIntegers {
  static constexpr unsigned long long kBegin = 8, kEnd = kBegin + 4 * kWords;

  unsigned words[kWords];

  DEVICE Side found(Side side) const {
    side.start.data = found(side.start.data);
    side.length.data = found(side.length.data);
    return side;
  }

 private:
  DEVICE const void* found(const void* data) const {
    const auto at = reinterpret_cast<unsigned long long>(data);
    return at - kBegin < kEnd - kBegin ? words + (at - kBegin) / 4 : data;
  }
};
template <>
struct CarriedIntegers<0> {
  DEVICE const Side& found(const Side& side) const { return side; }
};
