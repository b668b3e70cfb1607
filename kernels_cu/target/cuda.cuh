// The target of NVIDIA GPUs from Ampere on: the names of target/target.cuh by ldmatrix, cp.async, conversions and
// atomics. The matrix product is in target/cuda_product.cuh. No CUDA header is needed: 16-bit types are bit patterns.
#pragma once

#define DEVICE __device__ __forceinline__
#define OUT_OF_LINE __device__ __noinline__
#define KERNEL extern "C" __global__
// The byte offset of a field in a struct, as a constant expression. NVRTC before 13.1 has no offsetof.
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
// The threads that an SM holds at once.
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int kThreadsOfSm = 1536;
#else
constexpr int kThreadsOfSm = 2048;
#endif
DEVICE float infinity() { return __int_as_float(0x7f800000); }

DEVICE int thread_index() { return threadIdx.x; }
// The same index, read again from its special register. The compiler does not know that it is the same, so it neither
// keeps in registers nor computes early what depends on it.
DEVICE int reload_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}
DEVICE int block_index() { return blockIdx.x; }
DEVICE unsigned grid_size() { return gridDim.x; }

// Programmatic dependent launch, on Hopper and later. Where the host allows it (`Step.early`), blocks of a kernel start
// on an SM as soon as it has room, while earlier kernels of the stream still run.
//
// Allows the next kernel of the stream to start: once all blocks of this kernel have called this, and there is room.
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until all earlier kernels of the stream are done and their writes are visible. Each thread must call it before
// it touches memory that those kernels write. Before the call it may only prefetch such memory.
DEVICE void wait_for_prior_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void block_sync() { __syncthreads(); }
DEVICE void wave_sync() { __syncwarp(); }
// block_sync(), and whether any thread's predicate is true.
DEVICE bool block_any(bool predicate) { return __syncthreads_or(predicate); }
// Named barrier `id`, which must not be 0 (that is block_sync()'s). It opens when `threads` threads have come.
// barrier_sync() waits for that; barrier_arrive() only counts the caller's threads and goes on.
DEVICE void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DEVICE unsigned shuffle_xor(unsigned x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
// The x of lane `lane`.
DEVICE unsigned shuffle(unsigned x, int lane) { return __shfl_sync(~0u, x, lane); }
DEVICE bool wave_any(bool predicate) { return __any_sync(~0u, predicate); }
DEVICE unsigned wave_max(unsigned x) { return __reduce_max_sync(~0u, x); }
DEVICE int wave_count(bool predicate) { return __popc(__ballot_sync(~0u, predicate)); }
// Returns x, which is the same in every lane. The compiler learns that from the shuffle.
DEVICE int wave_uniform(int x) { return __shfl_sync(~0u, x, 0); }

DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float log2(float x) { return ::log2f(x); }
DEVICE float quick_log2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
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

// Converts the two float8 in the lower half of x to two float16, exactly.
DEVICE unsigned float16_pair(unsigned x) {
  unsigned pair;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<unsigned short>(x)));
#else
  // Exponent and mantissa of e4m3, shifted to those of a float16, mean 2^-8 times the value (the bias is 15 there, not
  // 7), of subnormal numbers too. The product with 256 makes up for it. Only a NaN has all of these bits set: adding 1
  // then carries into the float16's highest exponent bit, which makes it a NaN there.
  const unsigned wide = __byte_perm(x, 0, 0x1404);
  unsigned magnitude = (wide & 0x7f007f00u) >> 1;
  magnitude |= (magnitude + 0x00800080u) & 0x40004000u;
  constexpr unsigned k256 = 0x5c005c00u;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(magnitude | (wide & 0x80008000u)), "r"(k256));
#endif
  return pair;
}
// Converts all four float8 of x. In one asm statement the compiler takes the upper half of the register in place.
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

// Rounds to the nearest, ties to even. Magnitudes beyond 448 become 448, and NaN stays NaN.
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

// Prefetches a line of memory into the L2 cache. Nothing waits for it.
DEVICE void prefetch(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// Adds kCount floats to memory that other blocks add to at the same time, in no defined order. `address` is aligned to
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

DEVICE void atomic_add(unsigned long long* address, unsigned long long x) {
  asm volatile("red.global.add.u64 [%0], %1;" ::"l"(address), "l"(x) : "memory");
}

// add_pairs() for GPUs without an instruction for it: reads, adds in float32 and writes.
template <class T>
DEVICE void add_pairs_in_float32(T* address, const unsigned (&x)[4]) {
  UNROLL for (int i = 0; i < 8; i++) {
    const T added{static_cast<unsigned short>(x[i / 2] >> i % 2 * 16)};
    address[i] = from_float<T>(to_float(address[i]) + to_float(added));
  }
}

// Writes 16 bytes that are not read again soon: they leave the caches first.
DEVICE void store_streaming(void* address, const unsigned (&x)[4]) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// Adds eight elements, given in pairs, to 16 bytes of memory that only this thread writes.
DEVICE void add_pairs(float16* address, const unsigned (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]),
               "r"(x[3])
               : "memory");
#else
  add_pairs_in_float32(address, x);
#endif
}
DEVICE void add_pairs(bfloat16* address, const unsigned (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]),
               "r"(x[3])
               : "memory");
#else
  add_pairs_in_float32(address, x);
#endif
}

// Orders this thread's accesses to memory for all blocks of the device. Its writes before the fence are visible before
// its writes after it, and its reads after the fence are not made before it.
DEVICE void fence_device() { __threadfence(); }

// Adds x to a counter that blocks share, atomically, and returns its previous value.
DEVICE unsigned fetch_add(unsigned* counter, unsigned x) { return atomicAdd(counter, x); }
// fetch_add() that is also a fence. Between two barriers of the block it is one for all threads of the block: their
// writes are visible before the addition, and what other blocks wrote before their additions is visible to all of them.
DEVICE unsigned fetch_add_acq_rel(unsigned* counter, unsigned x) {
  unsigned was;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(was) : "l"(counter), "r"(x) : "memory");
  return was;
}
// Adds x to such a counter once the writes of this thread, and those of lanes that it has met at a wave_sync(), are
// visible to all blocks. The thread gets no answer to wait for.
DEVICE void add_release(unsigned* counter, unsigned x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}
// Reads such a counter. What other blocks wrote before their add_release() is visible to this thread afterwards, and to
// lanes that it meets at a wave_sync().
DEVICE unsigned load_acquire(const unsigned* counter) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}
// Adds 1 to a counter that stays below 2^32 - 2 and returns its previous value, which the thread does not wait for
// until it uses it. The compiler turns atomicAdd into one addition for all lanes of a warp, even where a single lane
// calls it, and waits for the result in order to distribute it. It does not do so to atomicInc, which may wrap around.
DEVICE unsigned fetch_increment_deferred(unsigned* counter) { return atomicInc(counter, ~1u); }

DEVICE unsigned shared_address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

// Starts an asynchronous copy of kBytes (4, 8 or 16) to shared memory. If !valid, zeros are written and `global` is not
// read. shared: an address in shared memory as a number, to which instructions add constants at no cost.
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
// copy_async() of data that is read only once: the L2 cache evicts it first.
template <int kBytes>
DEVICE void copy_async_evict_first(unsigned shared, const void* global, bool valid) {
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
// Waits for this thread's own copies, except those of the last kPending committed groups. Other threads of the block
// see the copied data after the next block_sync(), lanes of the same wave after the next wave_sync().
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

}  // namespace target
