// Starts and lengths of the host in the parameters of Hopper's forward itself, where they are few. No earlier launch
// has to bring them to device memory, and no such memory is allocated. Kernels that carry integers are compiled apart:
// so many bytes of parameters cost 0.15 us, and the test where integers lie costs 0.1 us.
#pragma once

#include "attn/params.cuh"
#include "target/target.cuh"

// Integers whose address, as the parameters give it, is in [kBegin, kEnd) are carried: they begin address - kBegin
// bytes into `words`. No memory has such an address.
template <int kWords>
struct CarriedIntegers {
  static constexpr unsigned long long kBegin = 8, kEnd = kBegin + 4 * kWords;

  unsigned words[kWords];

  // `side`, with the address of its carried integers.
  DEVICE Side resolve(Side side) const {
    side.start.data = resolve(side.start.data);
    side.length.data = resolve(side.length.data);
    return side;
  }

 private:
  DEVICE const void* resolve(const void* data) const {
    const auto at = reinterpret_cast<unsigned long long>(data);
    return at - kBegin < kEnd - kBegin ? words + (at - kBegin) / 4 : data;
  }
};
template <>
struct CarriedIntegers<0> {
  DEVICE const Side& resolve(const Side& side) const { return side; }
};
