// Stores of what a kernel soon reads: the L2 cache evicts it last.
#pragma once

#include "target/target.cuh"

namespace target {

// Stores kBytes (2, 4, 8 or 16) at an address that is a multiple of them. from: in registers.
template <int kBytes>
DEVICE void store_evict_last(void* to, const void* from) {
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16, "the widths of a store");
#if defined(RAWATTN_TARGET_HOST)
  __builtin_memcpy(to, from, kBytes);
#else
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  const unsigned* const x = static_cast<const unsigned*>(from);
  if constexpr (kBytes == 2) {
    asm volatile("st.global.L2::cache_hint.b16 [%0], %1, %2;" ::"l"(to), "h"(*static_cast<const unsigned short*>(from)),
                 "l"(policy)
                 : "memory");
  } else if constexpr (kBytes == 4) {
    asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(to), "r"(x[0]), "l"(policy) : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(to), "r"(x[0]), "r"(x[1]), "l"(policy)
                 : "memory");
  } else {
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3]), "l"(policy)
                 : "memory");
  }
#endif
}

}  // namespace target
