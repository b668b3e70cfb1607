// NVIDIA GPUs from Ampere on: mma.sync, ldmatrix, cp.async. No CUDA header is needed: 16-bit types are bit patterns
// here.
#pragma once

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__
// Where a field is in a struct, as a constant; NVRTC before 13.1 has no offsetof.
#define OFFSET_OF(type, field) __INTADDR__(&(((type*)0)->field))
#define LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#define PARAMETER const __grid_constant__
#define SHARED_MEMORY(name, bytes) SHARED_MEMORY_ALIGNED(name, bytes, 128)
#define SHARED_MEMORY_ALIGNED(name, bytes, alignment) \
  extern __shared__ __align__(alignment)              \
  unsigned char name[]
#define UNROLL _Pragma("unroll")

struct float16 {
  unsigned short bits;
};
struct bfloat16 {
  unsigned short bits;
};
#include "target/float8.cuh"

namespace target {

constexpr int kWave = 32;
DEVICE float infinity() { return __int_as_float(0x7f800000); }

DEVICE int thread_index() { return threadIdx.x; }
// The same, but the compiler does not know it: it neither keeps nor computes early what depends on this.
DEVICE int thread_index_anew() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}
DEVICE int block_index() { return blockIdx.x; }
DEVICE unsigned grid_size() { return gridDim.x; }

DEVICE void block_sync() { __syncthreads(); }
DEVICE void wave_sync() { __syncwarp(); }
// Waves meet at barrier `id`, not 0, when `threads` have come: some wait there (sync), others only say that they came
// (arrive).
DEVICE void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DEVICE unsigned shuffle_xor(unsigned x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DEVICE bool wave_any(bool predicate) { return __any_sync(~0u, predicate); }
// Through a shuffle the compiler learns that x is the same in every lane.
DEVICE int wave_uniform(int x) { return __shfl_sync(~0u, x, 0); }

DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float log2(float x) { return ::log2f(x); }
DEVICE float exp(float x) { return ::expf(x); }
DEVICE float log(float x) { return ::logf(x); }
DEVICE float sin(float x) { return ::sinf(x); }
DEVICE float cos(float x) { return ::cosf(x); }
DEVICE float sqrt(float x) { return ::sqrtf(x); }
DEVICE float floor(float x) { return ::floorf(x); }
DEVICE float fmod(float x, float y) { return ::fmodf(x, y); }
DEVICE float pow(float x, float y) { return ::powf(x, y); }
DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float tanh(float x) { return ::tanhf(x); }
DEVICE int bits_of(float x) { return __float_as_int(x); }
DEVICE float float_of(unsigned bits) { return __uint_as_float(bits); }

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(float16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
DEVICE float to_float(bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }

// Two float8, the lower half of x, become two float16: exactly.
DEVICE unsigned float16_pair(unsigned x) {
  unsigned pair;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<unsigned short>(x)));
#else
  // In the place of a float16's exponent, theirs means 2^8 times less, of subnormal numbers too. A carry out of both
  // exponent and mantissa, which only NaN has, makes it one here.
  const unsigned wide = __byte_perm(x, 0, 0x1404);
  unsigned magnitude = (wide & 0x7f007f00u) >> 1;
  magnitude |= (magnitude + 0x00800080u) & 0x40004000u;
  constexpr unsigned k256 = 0x5c005c00u;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(magnitude | (wide & 0x80008000u)), "r"(k256));
#endif
  return pair;
}
// All four of x: of a register's halves the compiler takes the upper one where it is.
DEVICE void float16_pairs(unsigned (&pairs)[2], unsigned x) {
#if __CUDA_ARCH__ >= 890
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(pairs[0]), "=r"(pairs[1])
      : "r"(x));
#else
  pairs[0] = float16_pair(x);
  pairs[1] = float16_pair(x >> 16);
#endif
}
DEVICE float to_float(float8 x) { return to_float(float16{static_cast<unsigned short>(float16_pair(x.bits))}); }

template <class T>
DEVICE T from_float(float x);
template <>
DEVICE float from_float<float>(float x) {
  return x;
}
template <>
DEVICE float16 from_float<float16>(float x) {
  float16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
DEVICE bfloat16 from_float<bfloat16>(float x) {
  bfloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// To the nearest, ties to even; what is beyond 448 becomes 448, and NaN stays NaN.
template <>
DEVICE float8 from_float<float8>(float x) {
#if __CUDA_ARCH__ >= 890
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return {static_cast<unsigned char>(pair)};
#else
  return float8_of_float_bits(__float_as_uint(x));
#endif
}

// Asks for memory that is read soon. Nobody waits for it.
DEVICE void prefetch(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// Adds to memory that other blocks add to at the same time; in which order is not defined. `address` is aligned to
// kCount floats.
template <int kCount>
DEVICE void atomic_add(float* address, const float (&x)[kCount]) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kCount == 4) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
    return;
  }
#endif
  UNROLL for (int i = 0; i < kCount; i++) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address + i), "f"(x[i]) : "memory");
  }
}

// Pairs of elements are added to 16 bytes of memory.
template <class T>
DEVICE void add_pairs_by_float(T* address, const unsigned (&x)[4]) {
  UNROLL for (int i = 0; i < 8; i++) {
    const T added{static_cast<unsigned short>(x[i / 2] >> i % 2 * 16)};
    address[i] = from_float<T>(to_float(address[i]) + to_float(added));
  }
}

// Writes 16 bytes that are not read soon.
DEVICE void store_once(void* address, const unsigned (&x)[4]) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// Adds pairs of elements to 16 bytes of memory that this thread alone writes.
DEVICE void add_pairs(float16* address, const unsigned (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]),
               "r"(x[3])
               : "memory");
#else
  add_pairs_by_float(address, x);
#endif
}
DEVICE void add_pairs(bfloat16* address, const unsigned (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]),
               "r"(x[3])
               : "memory");
#else
  add_pairs_by_float(address, x);
#endif
}

// What this thread has written is there for the device's other blocks before what it writes from here on; and the
// other way round for what it reads.
DEVICE void fence_device() { __threadfence(); }

// Adds 1 or more to a counter that other blocks share, and returns what it was.
DEVICE unsigned fetch_add(unsigned* counter, unsigned x) { return atomicAdd(counter, x); }
// Likewise, and a fence for all threads of the block, if it stands between two barriers: what they wrote is there
// before the addition, and what blocks wrote before theirs is there for all of them.
DEVICE unsigned fetch_add_in_order(unsigned* counter, unsigned x) {
  unsigned was;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(was) : "l"(counter), "r"(x) : "memory");
  return was;
}
// Adds 1 to one that stays below 2^32 - 2, and the thread goes on before it has what it was. Of additions the compiler
// makes one for all lanes of a warp, also where a lone lane comes here, and waits for the result to share it out: not
// of an increment that wraps around early.
DEVICE unsigned fetch_increment(unsigned* counter) { return atomicInc(counter, ~1u); }

DEVICE unsigned shared_address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

// Copies kBytes (4, 8 or 16) to shared memory behind the thread's back; zeros instead when !valid, and then `global` is
// not read. shared: an address there, to which a constant can be added for nothing.
template <int kBytes>
DEVICE void copy_async(unsigned shared, const void* global, bool valid) {
  const int readable = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(readable)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes), "r"(readable)
                 : "memory");
  }
}
// Likewise, of what is read once: it leaves the L2 cache before all else.
template <int kBytes>
DEVICE void copy_async_once(unsigned shared, const void* global, bool valid) {
  const int readable = valid ? kBytes : 0;
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
                 "r"(readable), "l"(policy)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3, %4;" ::"r"(shared), "l"(global),
                 "n"(kBytes), "r"(readable), "l"(policy)
                 : "memory");
  }
}
template <int kBytes>
DEVICE void copy_async(void* shared, const void* global, bool valid) {
  copy_async<kBytes>(shared_address(shared), global, valid);
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for this thread's own copies, but for the kPending groups that were committed last; other threads see them
// after the next block_sync(), those of the wave after the next wave_sync().
template <int kPending = 0>
DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

DEVICE void ldmatrix(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
DEVICE void stmatrix(void* row, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
DEVICE void ldmatrix(unsigned (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}
DEVICE void ldmatrix_transposed(unsigned (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}
DEVICE void ldmatrix_transposed(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// The accumulator of a 16 x 16 product, shared by every type: lane l holds rows l/4 and l/4 + 8, and in each of the two
// 8-column halves the columns 2*(l%4) and 2*(l%4) + 1. Element e = 4*half + 2*slot + parity.
struct Accumulator {
  static constexpr int kElements = 8;
  static constexpr int kSlots = 2;  // distinct rows a lane holds
  float x[kElements];

  static constexpr int kRun = kElements / kSlots;  // elements of one row that a lane holds

  DEVICE static constexpr int slot(int e) { return (e >> 1) & 1; }
  DEVICE static constexpr int element(int slot, int i) {
    return (i & 1) + 2 * slot + 4 * (i >> 1);
  }  // the i-th of a row
  // Where a column stands if the lanes of a row put what they hold of it side by side.
  DEVICE static constexpr int position(int column) { return column / 2 % 4 * kRun + column % 2 + column / 8 * 2; }
  DEVICE static int row(int lane, int slot) { return lane / 4 + 8 * slot; }
  DEVICE static int column(int lane, int e) { return 2 * (lane % 4) + (e & 1) + 8 * (e >> 2); }

  // Reductions over the four lanes that share a row.
  DEVICE static float row_max(float x) {
    x = fmaxf(x, shuffle_xor(x, 1));
    return fmaxf(x, shuffle_xor(x, 2));
  }
  DEVICE static float row_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
  }
};

template <class T>
struct Mma16Bit {
  static constexpr int kDepth = 16;
  static constexpr bool kAccumulatorFeedsA = true;
  using C = Accumulator;
  struct A {
    unsigned r[4];
  };
  struct B {
    unsigned r[4];
  };

  // A[m][k] = tile[m * pitch + k]
  DEVICE static A load_a(const T* tile, int pitch, int lane) {
    A a;
    ldmatrix(a.r, tile + (lane % 16) * pitch + (lane / 16) * 8);
    return a;
  }
  // A[m][k] = tile[k * pitch + m]
  DEVICE static A load_a_columns(const T* tile, int pitch, int lane) {
    A a;
    ldmatrix_transposed(a.r, tile + (lane % 8 + lane / 16 * 8) * pitch + (lane / 8 % 2) * 8);
    return a;
  }
  // tile[m * pitch + k] = A[m][k]
  DEVICE static void store_a(const A& a, T* tile, int pitch, int lane) {
#if __CUDA_ARCH__ >= 900
    stmatrix(tile + (lane % 16) * pitch + (lane / 16) * 8, a.r);
#else
    UNROLL for (int i = 0; i < 4; i++) {
      *reinterpret_cast<unsigned*>(tile + (lane / 4 + i % 2 * 8) * pitch + lane % 4 * 2 + i / 2 * 8) = a.r[i];
    }
#endif
  }
  // B[k][n] = tile[n * pitch + k]
  DEVICE static B load_b_rows(const T* tile, int pitch, int lane) {
    B b;
    ldmatrix(b.r, tile + (lane % 8 + lane / 16 * 8) * pitch + (lane / 8 % 2) * 8);
    return b;
  }
  // B[k][n] = tile[k * pitch + n]
  DEVICE static B load_b_columns(const T* tile, int pitch, int lane) {
    B b;
    ldmatrix_transposed(b.r, tile + (lane % 16) * pitch + (lane / 16) * 8);
    return b;
  }
  // The same where runs of 8 elements lie anywhere: run(row, column) is the one of a row that begins with a column.
  template <class Run>
  DEVICE static B load_b_rows_of(const Run& run, int lane) {
    B b;
    ldmatrix(b.r, run(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8));
    return b;
  }
  template <class Run>
  DEVICE static B load_b_columns_of(const Run& run, int lane) {
    B b;
    ldmatrix_transposed(b.r, run(lane % 16, lane / 16 * 8));
    return b;
  }
  // Tiles of float8, converted on their way into registers. run(row, column): where 16 neighbours begin. A lane gets
  // four neighbours of a row at once, which is the order of the depth here; `load_a_float8` has it too.
  template <class Run>
  DEVICE static B load_b_rows_float8(const Run& run, int lane) {
    unsigned r[2];
    ldmatrix(r, run(lane % 16, 0));
    B b;
    UNROLL for (int i = 0; i < 2; i++) {
      unsigned pairs[2];
      float16_pairs(pairs, r[i]);
      b.r[2 * i] = pairs[0];
      b.r[2 * i + 1] = pairs[1];
    }
    return b;
  }
  // A lane gets two neighbours of each of two rows: they are of both halves of the columns.
  template <class Run>
  DEVICE static B load_b_columns_float8(const Run& run, int lane) {
    unsigned r[2];
    ldmatrix_transposed(r, run(lane % 16, 0));
    B b;
    UNROLL for (int i = 0; i < 2; i++) {
      unsigned pairs[2];
      float16_pairs(pairs, __byte_perm(r[i], 0, 0x3120));
      b.r[i] = pairs[0];
      b.r[2 + i] = pairs[1];
    }
    return b;
  }
  DEVICE static A load_a_float8(const T* tile, int pitch, int lane) {
    A a;
    UNROLL for (int i = 0; i < 2; i++) {
      const uint2 four = *reinterpret_cast<const uint2*>(tile + (lane / 4 + i * 8) * pitch + lane % 4 * 4);
      a.r[i] = four.x;
      a.r[2 + i] = four.y;
    }
    return a;
  }
  DEVICE static unsigned pack_pair(float low, float high);
  // The i-th two of a lane's elements.
  DEVICE static unsigned pair(const B& b, int i) { return b.r[i]; }
  // A 16 x 16 accumulator has, element by element, the layout of an A operand.
  DEVICE static A from_accumulator(const C& c) {
    A a;
    UNROLL for (int i = 0; i < 4; i++) a.r[i] = pack_pair(c.x[2 * i], c.x[2 * i + 1]);
    return a;
  }
  DEVICE static C to_accumulator(const A& a) {
    C c;
    UNROLL for (int i = 0; i < 4; i++) {
      c.x[2 * i] = to_float(T{static_cast<unsigned short>(a.r[i])});
      c.x[2 * i + 1] = to_float(T{static_cast<unsigned short>(a.r[i] >> 16)});
    }
    return c;
  }
  // An operand kept in the first registers of an accumulator that is needed no more.
  DEVICE static void keep(C& c, const A& a) { UNROLL for (int i = 0; i < 4; i++) c.x[i] = float_of(a.r[i]); }
  DEVICE static A kept(const C& c) {
    A a;
    UNROLL for (int i = 0; i < 4; i++) a.r[i] = bits_of(c.x[i]);
    return a;
  }
  DEVICE static void multiply_add(C& c, const A& a, const B& b);
};

template <class T>
struct Mma;

#define RAWATTN_MMA_16BIT(T, name)                                                                              \
  template <>                                                                                                   \
  DEVICE unsigned Mma16Bit<T>::pack_pair(float low, float high) {                                               \
    unsigned pair;                                                                                              \
    asm("cvt.rn." name "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));                                \
    return pair;                                                                                                \
  }                                                                                                             \
  template <>                                                                                                   \
  DEVICE void Mma16Bit<T>::multiply_add(C& c, const A& a, const B& b) {                                         \
    UNROLL for (int h = 0; h < 2; h++) {                                                                        \
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                       \
                   ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "                                                        \
                   "{%8,%9}, {%0,%1,%2,%3};"                                                                    \
                   : "+f"(c.x[4 * h]), "+f"(c.x[4 * h + 1]), "+f"(c.x[4 * h + 2]), "+f"(c.x[4 * h + 3])         \
                   : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[2 * h]), "r"(b.r[2 * h + 1])); \
    }                                                                                                           \
  }                                                                                                             \
  template <>                                                                                                   \
  struct Mma<T> : Mma16Bit<T> {};

RAWATTN_MMA_16BIT(float16, "f16")
RAWATTN_MMA_16BIT(bfloat16, "bf16")
#undef RAWATTN_MMA_16BIT

// float32 keeps float32 accuracy: fused multiply-adds, not TF32. A lane reads the operands of its own two rows and four
// columns.
template <>
struct Mma<float> {
  static constexpr int kDepth = 4;
  static constexpr bool kAccumulatorFeedsA = false;
  using C = Accumulator;
  struct A {
    float4 row[2];
  };
  struct B {
    float4 column[4];  // 2 * half + parity
  };

  DEVICE static A load_a(const float* tile, int pitch, int lane) {
    A a;
    UNROLL for (int slot = 0; slot < 2; slot++) {
      a.row[slot] = *reinterpret_cast<const float4*>(tile + C::row(lane, slot) * pitch);
    }
    return a;
  }
  DEVICE static A load_a_columns(const float* tile, int pitch, int lane) {
    A a;
    UNROLL for (int slot = 0; slot < 2; slot++) {
      const float* const column = tile + C::row(lane, slot);
      a.row[slot] = make_float4(column[0], column[pitch], column[2 * pitch], column[3 * pitch]);
    }
    return a;
  }
  DEVICE static B load_b_rows(const float* tile, int pitch, int lane) {
    B b;
    UNROLL for (int n = 0; n < 4; n++) {
      b.column[n] = *reinterpret_cast<const float4*>(tile + C::column(lane, (n >> 1) * 4 + (n & 1)) * pitch);
    }
    return b;
  }
  DEVICE static B load_b_columns(const float* tile, int pitch, int lane) {
    B b;
    UNROLL for (int half = 0; half < 2; half++) {
      float2 k[4];
      UNROLL for (int i = 0; i < 4; i++) {
        k[i] = *reinterpret_cast<const float2*>(tile + i * pitch + C::column(lane, half * 4));
      }
      b.column[2 * half] = make_float4(k[0].x, k[1].x, k[2].x, k[3].x);
      b.column[2 * half + 1] = make_float4(k[0].y, k[1].y, k[2].y, k[3].y);
    }
    return b;
  }
  // Tiles of float8: run(row, column) is where neighbours begin.
  template <class Run>
  DEVICE static B load_b_rows_float8(const Run& run, int lane) {
    B b;
    UNROLL for (int n = 0; n < 4; n++) b.column[n] = four_floats(run(C::column(lane, (n >> 1) * 4 + (n & 1)), 0));
    return b;
  }
  // Of each row four neighbours, as other types have them.
  template <class Run>
  DEVICE static B load_b_columns_float8(const Run& run, int lane) {
    float4 k[4];
    UNROLL for (int i = 0; i < 4; i++) k[i] = four_floats(run(i, lane % 4 * 4));
    B b;
    b.column[0] = make_float4(k[0].x, k[1].x, k[2].x, k[3].x);
    b.column[2] = make_float4(k[0].y, k[1].y, k[2].y, k[3].y);
    b.column[1] = make_float4(k[0].z, k[1].z, k[2].z, k[3].z);
    b.column[3] = make_float4(k[0].w, k[1].w, k[2].w, k[3].w);
    return b;
  }
  DEVICE static A load_a_float8(const float* tile, int pitch, int lane) { return load_a(tile, pitch, lane); }
  DEVICE static void multiply_add(C& c, const A& a, const B& b) {
    UNROLL for (int e = 0; e < C::kElements; e++) {
      const float4 x = a.row[C::slot(e)];
      const float4 y = b.column[2 * (e >> 2) + (e & 1)];
      c.x[e] = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, c.x[e]))));
    }
  }

 private:
  DEVICE static float4 four_floats(const float8* four) {
    const unsigned x = *reinterpret_cast<const unsigned*>(four);
    const auto one = [](unsigned byte) { return to_float(float8{static_cast<unsigned char>(byte)}); };
    return make_float4(one(x), one(x >> 8), one(x >> 16), one(x >> 24));
  }
};

}  // namespace target
