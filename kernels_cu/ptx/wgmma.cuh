// wgmma: the four warps of a warpgroup multiply 64 x 16 by 16 x N asynchronously, and accumulate in registers.
//
// B, and A where it is not in registers, lie in shared memory and are given by descriptors (ptx/descriptor.cuh). The
// accumulator of the warpgroup is 64 x N: warp w holds rows 16 w to 16 w + 15 in N / 16 blocks laid out like
// target::Accumulator.
#pragma once

#include "ptx/descriptor.cuh"
#include "target/cuda.cuh"

namespace ptx {

// Orders ordinary accesses to accumulators and A registers before the products that follow.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups of products are still under way.
template <int kPending>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Ties accumulators to the wait before this call. Without it the compiler would move reads of them above the wait.
template <class C, int kBlocks>
DEVICE void wgmma_results(C (&c)[kBlocks]) {
  UNROLL for (int b = 0; b < kBlocks; b++) {
    UNROLL for (int e = 0; e < C::kElements; e++) asm volatile("" : "+f"(c[b].x[e])::"memory");
  }
}

// ss<A's major, B's major>: c = A * B, or c += A * B with `accumulate`; both in shared memory. Q and K are K-major.
// rs<B's major>: c += A * B; A (64 x 16) in registers. V is MN-major.
template <class T, int kColumns>
struct Wgmma;
// The same for tf32: 64 x 8 by 8 x N, both operands K-major. ss: c += A * B.
template <int kColumns>
struct WgmmaTf32;

// clang-format off
#define RAWATTN_LIST_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define RAWATTN_REGS_0 "+f"(c[0].x[0]), "+f"(c[0].x[1]), "+f"(c[0].x[2]), "+f"(c[0].x[3]), "+f"(c[0].x[4]), "+f"(c[0].x[5]), "+f"(c[0].x[6]), "+f"(c[0].x[7])
#define RAWATTN_LIST_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define RAWATTN_REGS_1 "+f"(c[1].x[0]), "+f"(c[1].x[1]), "+f"(c[1].x[2]), "+f"(c[1].x[3]), "+f"(c[1].x[4]), "+f"(c[1].x[5]), "+f"(c[1].x[6]), "+f"(c[1].x[7])
#define RAWATTN_LIST_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define RAWATTN_REGS_2 "+f"(c[2].x[0]), "+f"(c[2].x[1]), "+f"(c[2].x[2]), "+f"(c[2].x[3]), "+f"(c[2].x[4]), "+f"(c[2].x[5]), "+f"(c[2].x[6]), "+f"(c[2].x[7])
#define RAWATTN_LIST_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define RAWATTN_REGS_3 "+f"(c[3].x[0]), "+f"(c[3].x[1]), "+f"(c[3].x[2]), "+f"(c[3].x[3]), "+f"(c[3].x[4]), "+f"(c[3].x[5]), "+f"(c[3].x[6]), "+f"(c[3].x[7])
#define RAWATTN_LIST_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define RAWATTN_REGS_4 "+f"(c[4].x[0]), "+f"(c[4].x[1]), "+f"(c[4].x[2]), "+f"(c[4].x[3]), "+f"(c[4].x[4]), "+f"(c[4].x[5]), "+f"(c[4].x[6]), "+f"(c[4].x[7])
#define RAWATTN_LIST_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define RAWATTN_REGS_5 "+f"(c[5].x[0]), "+f"(c[5].x[1]), "+f"(c[5].x[2]), "+f"(c[5].x[3]), "+f"(c[5].x[4]), "+f"(c[5].x[5]), "+f"(c[5].x[6]), "+f"(c[5].x[7])
#define RAWATTN_LIST_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define RAWATTN_REGS_6 "+f"(c[6].x[0]), "+f"(c[6].x[1]), "+f"(c[6].x[2]), "+f"(c[6].x[3]), "+f"(c[6].x[4]), "+f"(c[6].x[5]), "+f"(c[6].x[6]), "+f"(c[6].x[7])
#define RAWATTN_LIST_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define RAWATTN_REGS_7 "+f"(c[7].x[0]), "+f"(c[7].x[1]), "+f"(c[7].x[2]), "+f"(c[7].x[3]), "+f"(c[7].x[4]), "+f"(c[7].x[5]), "+f"(c[7].x[6]), "+f"(c[7].x[7])
#define RAWATTN_LIST_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define RAWATTN_REGS_8 "+f"(c[8].x[0]), "+f"(c[8].x[1]), "+f"(c[8].x[2]), "+f"(c[8].x[3]), "+f"(c[8].x[4]), "+f"(c[8].x[5]), "+f"(c[8].x[6]), "+f"(c[8].x[7])
#define RAWATTN_LIST_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define RAWATTN_REGS_9 "+f"(c[9].x[0]), "+f"(c[9].x[1]), "+f"(c[9].x[2]), "+f"(c[9].x[3]), "+f"(c[9].x[4]), "+f"(c[9].x[5]), "+f"(c[9].x[6]), "+f"(c[9].x[7])
#define RAWATTN_LIST_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define RAWATTN_REGS_10 "+f"(c[10].x[0]), "+f"(c[10].x[1]), "+f"(c[10].x[2]), "+f"(c[10].x[3]), "+f"(c[10].x[4]), "+f"(c[10].x[5]), "+f"(c[10].x[6]), "+f"(c[10].x[7])
#define RAWATTN_LIST_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define RAWATTN_REGS_11 "+f"(c[11].x[0]), "+f"(c[11].x[1]), "+f"(c[11].x[2]), "+f"(c[11].x[3]), "+f"(c[11].x[4]), "+f"(c[11].x[5]), "+f"(c[11].x[6]), "+f"(c[11].x[7])
#define RAWATTN_LIST_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define RAWATTN_REGS_12 "+f"(c[12].x[0]), "+f"(c[12].x[1]), "+f"(c[12].x[2]), "+f"(c[12].x[3]), "+f"(c[12].x[4]), "+f"(c[12].x[5]), "+f"(c[12].x[6]), "+f"(c[12].x[7])
#define RAWATTN_LIST_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define RAWATTN_REGS_13 "+f"(c[13].x[0]), "+f"(c[13].x[1]), "+f"(c[13].x[2]), "+f"(c[13].x[3]), "+f"(c[13].x[4]), "+f"(c[13].x[5]), "+f"(c[13].x[6]), "+f"(c[13].x[7])
#define RAWATTN_LIST_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define RAWATTN_REGS_14 "+f"(c[14].x[0]), "+f"(c[14].x[1]), "+f"(c[14].x[2]), "+f"(c[14].x[3]), "+f"(c[14].x[4]), "+f"(c[14].x[5]), "+f"(c[14].x[6]), "+f"(c[14].x[7])
#define RAWATTN_LIST_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define RAWATTN_REGS_15 "+f"(c[15].x[0]), "+f"(c[15].x[1]), "+f"(c[15].x[2]), "+f"(c[15].x[3]), "+f"(c[15].x[4]), "+f"(c[15].x[5]), "+f"(c[15].x[6]), "+f"(c[15].x[7])

#define RAWATTN_LISTS_16 RAWATTN_LIST_0
#define RAWATTN_REGSS_16 RAWATTN_REGS_0
#define RAWATTN_LISTS_32 RAWATTN_LISTS_16 ", " RAWATTN_LIST_1
#define RAWATTN_REGSS_32 RAWATTN_REGSS_16, RAWATTN_REGS_1
#define RAWATTN_LISTS_48 RAWATTN_LISTS_32 ", " RAWATTN_LIST_2
#define RAWATTN_REGSS_48 RAWATTN_REGSS_32, RAWATTN_REGS_2
#define RAWATTN_LISTS_64 RAWATTN_LISTS_48 ", " RAWATTN_LIST_3
#define RAWATTN_REGSS_64 RAWATTN_REGSS_48, RAWATTN_REGS_3
#define RAWATTN_LISTS_80 RAWATTN_LISTS_64 ", " RAWATTN_LIST_4
#define RAWATTN_REGSS_80 RAWATTN_REGSS_64, RAWATTN_REGS_4
#define RAWATTN_LISTS_96 RAWATTN_LISTS_80 ", " RAWATTN_LIST_5
#define RAWATTN_REGSS_96 RAWATTN_REGSS_80, RAWATTN_REGS_5
#define RAWATTN_LISTS_112 RAWATTN_LISTS_96 ", " RAWATTN_LIST_6
#define RAWATTN_REGSS_112 RAWATTN_REGSS_96, RAWATTN_REGS_6
#define RAWATTN_LISTS_128 RAWATTN_LISTS_112 ", " RAWATTN_LIST_7
#define RAWATTN_REGSS_128 RAWATTN_REGSS_112, RAWATTN_REGS_7
#define RAWATTN_LISTS_144 RAWATTN_LISTS_128 ", " RAWATTN_LIST_8
#define RAWATTN_REGSS_144 RAWATTN_REGSS_128, RAWATTN_REGS_8
#define RAWATTN_LISTS_160 RAWATTN_LISTS_144 ", " RAWATTN_LIST_9
#define RAWATTN_REGSS_160 RAWATTN_REGSS_144, RAWATTN_REGS_9
#define RAWATTN_LISTS_176 RAWATTN_LISTS_160 ", " RAWATTN_LIST_10
#define RAWATTN_REGSS_176 RAWATTN_REGSS_160, RAWATTN_REGS_10
#define RAWATTN_LISTS_192 RAWATTN_LISTS_176 ", " RAWATTN_LIST_11
#define RAWATTN_REGSS_192 RAWATTN_REGSS_176, RAWATTN_REGS_11
#define RAWATTN_LISTS_208 RAWATTN_LISTS_192 ", " RAWATTN_LIST_12
#define RAWATTN_REGSS_208 RAWATTN_REGSS_192, RAWATTN_REGS_12
#define RAWATTN_LISTS_224 RAWATTN_LISTS_208 ", " RAWATTN_LIST_13
#define RAWATTN_REGSS_224 RAWATTN_REGSS_208, RAWATTN_REGS_13
#define RAWATTN_LISTS_240 RAWATTN_LISTS_224 ", " RAWATTN_LIST_14
#define RAWATTN_REGSS_240 RAWATTN_REGSS_224, RAWATTN_REGS_14
#define RAWATTN_LISTS_256 RAWATTN_LISTS_240 ", " RAWATTN_LIST_15
#define RAWATTN_REGSS_256 RAWATTN_REGSS_240, RAWATTN_REGS_15

// r0 to r5: the numbers of the asm operands that follow the accumulator's. n columns have n / 2 of those before them.
#define RAWATTN_WGMMA(T, type, n, r0, r1, r2, r3, r4, r5)                                                             \
  template <>                                                                                                         \
  struct Wgmma<T, n> {                                                                                                \
    template <Major kA, Major kB, class C>                                                                            \
    DEVICE static void ss(C (&c)[n / 16], unsigned long long a, unsigned long long b, int accumulate) {               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r2 ", 0;\n"                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" RAWATTN_LISTS_##n "}, %" #r0  \
                   ", %" #r1 ", p, 1, 1, %" #r3 ", %" #r4 ";\n}\n"                                                    \
                   : RAWATTN_REGSS_##n : "l"(a), "l"(b), "r"(accumulate), "n"(int(kA)), "n"(int(kB)));                \
    }                                                                                                                 \
    template <Major kB, class C, class A>                                                                             \
    DEVICE static void rs(C (&c)[n / 16], const A& a, unsigned long long b) {                                         \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" RAWATTN_LISTS_##n "}, {%" #r0 \
                   ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", 1, 1, 1, %" #r5 ";"                                    \
                   : RAWATTN_REGSS_##n                                                                                \
                   : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "l"(b), "n"(int(kB)));                       \
    }                                                                                                                 \
  };
#define RAWATTN_WGMMA_TF32(n, r0, r1, ...)                                                                            \
  template <>                                                                                                         \
  struct WgmmaTf32<n> {                                                                                               \
    template <class C>                                                                                                \
    DEVICE static void ss(C (&c)[n / 16], unsigned long long a, unsigned long long b) {                               \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k8.f32.tf32.tf32 {" RAWATTN_LISTS_##n "}, %" #r0           \
                   ", %" #r1 ", 1, 1, 1;"                                                                             \
                   : RAWATTN_REGSS_##n : "l"(a), "l"(b));                                                             \
    }                                                                                                                 \
  };
#define RAWATTN_WGMMA_TYPES(n, ...)                 \
  RAWATTN_WGMMA(float16, "f16", n, __VA_ARGS__)     \
  RAWATTN_WGMMA(bfloat16, "bf16", n, __VA_ARGS__)   \
  RAWATTN_WGMMA_TF32(n, __VA_ARGS__)

RAWATTN_WGMMA_TYPES(16, 8, 9, 10, 11, 12, 13)
RAWATTN_WGMMA_TYPES(32, 16, 17, 18, 19, 20, 21)
RAWATTN_WGMMA_TYPES(48, 24, 25, 26, 27, 28, 29)
RAWATTN_WGMMA_TYPES(64, 32, 33, 34, 35, 36, 37)
RAWATTN_WGMMA_TYPES(80, 40, 41, 42, 43, 44, 45)
RAWATTN_WGMMA_TYPES(96, 48, 49, 50, 51, 52, 53)
RAWATTN_WGMMA_TYPES(112, 56, 57, 58, 59, 60, 61)
RAWATTN_WGMMA_TYPES(128, 64, 65, 66, 67, 68, 69)
RAWATTN_WGMMA_TYPES(144, 72, 73, 74, 75, 76, 77)
RAWATTN_WGMMA_TYPES(160, 80, 81, 82, 83, 84, 85)
RAWATTN_WGMMA_TYPES(176, 88, 89, 90, 91, 92, 93)
RAWATTN_WGMMA_TYPES(192, 96, 97, 98, 99, 100, 101)
RAWATTN_WGMMA_TYPES(208, 104, 105, 106, 107, 108, 109)
RAWATTN_WGMMA_TYPES(224, 112, 113, 114, 115, 116, 117)
RAWATTN_WGMMA_TYPES(240, 120, 121, 122, 123, 124, 125)
RAWATTN_WGMMA_TYPES(256, 128, 129, 130, 131, 132, 133)
// clang-format on

}  // namespace ptx
