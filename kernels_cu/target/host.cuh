// The target of tests: a GPU simulated in plain C++. Every thread is a fiber. Blocks run one after the other, those of
// a cluster together. tests/shim/machine.cpp is the simulator; this file makes its primitives the names of
// target/target.cuh. RAWATTN_WAVE chooses waves of 32 threads with Ampere's fragments or of 64 with CDNA's.
//
// The simulation is stricter than a GPU. What a thread may not rely on yet is NaN: shared memory at the start of a
// block, and the destination of an asynchronous copy until the copy was waited for. Waves run ahead of each other as
// far as barriers let them. Threads of a wave that meet in different primitives stop the run.
#pragma once

// Declared here, because the C++ header costs a third of the time that a kernel takes to compile.
extern "C" {
float copysignf(float, float) noexcept;
float cosf(float) noexcept;
float exp2f(float) noexcept;
float expf(float) noexcept;
float fabsf(float) noexcept;
float floorf(float) noexcept;
float fmaf(float, float, float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float fmodf(float, float) noexcept;
float log2f(float) noexcept;
float logf(float) noexcept;
float powf(float, float) noexcept;
float sinf(float) noexcept;
float sqrtf(float) noexcept;
float tanhf(float) noexcept;
}

#define DEVICE inline
#define OUT_OF_LINE inline
#define KERNEL extern "C"
#define OFFSET_OF(type, field) __builtin_offsetof(type, field)
#define LAUNCH_BOUNDS(threads, blocks)
#define CLUSTER(blocks)  // the launch says how many blocks a cluster has
#define PARAMETER const
#define SHARED_MEMORY(name, bytes) SHARED_MEMORY_ALIGNED(name, bytes, 128)
#define SHARED_MEMORY_ALIGNED(name, bytes, alignment) unsigned char* const name = host::shared_memory(bytes, alignment)
#define UNROLL

struct float16 {
  unsigned short bits;
};
struct bfloat16 {
  unsigned short bits;
};
#include "target/float8.cuh"

namespace host {

// Runs when all lanes of a wave have come, and combines the payloads that they brought, which are in lane order.
using Combine = void (*)(void* const* payloads);

int thread_index();
int block_index();
int grid_size();
unsigned char* shared_memory(int bytes, int alignment);
unsigned shared_address(const void* pointer);
unsigned char* shared_pointer(unsigned address);
// Both return when every thread of the wave, or of the block, has come. `name` and `detail` say what a thread waits
// for.
void meet_wave(const char* name, int detail, Combine combine, void* payload);
void meet_block();
bool block_any(bool predicate);
void launch_dependents();
void wait_for_prior_kernels();
void named_barrier(int id, int threads, bool wait);
void stmatrix(void* row, const unsigned (&r)[4]);
void copy_later(void* shared, const void* global, int bytes, bool valid);
void commit_copies();
void perform_copies(int pending);
// c += a b, all 16 x 16 and dense, with the first `depth` columns of a and rows of b.
void multiply_add(float* c, const float* a, const float* b, int depth);
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace host

namespace target {

constexpr int kWave = RAWATTN_WAVE;
constexpr int kThreadsOfSm = 2048;
static_assert(kWave == 32 || kWave == 64, "RAWATTN_WAVE is 32 or 64");

DEVICE float float_of(unsigned bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}
DEVICE unsigned bits_of(float x) {
  unsigned bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

DEVICE float infinity() { return float_of(0x7f800000); }

DEVICE int thread_index() { return host::thread_index(); }
DEVICE int reload_thread_index() { return host::thread_index(); }
DEVICE int block_index() { return host::block_index(); }
DEVICE unsigned grid_size() { return static_cast<unsigned>(host::grid_size()); }

DEVICE void launch_dependents() { host::launch_dependents(); }
DEVICE void wait_for_prior_kernels() { host::wait_for_prior_kernels(); }
DEVICE void block_sync() { host::meet_block(); }
DEVICE bool block_any(bool predicate) { return host::block_any(predicate); }
DEVICE void barrier_sync(int id, int threads) { host::named_barrier(id, threads, true); }
DEVICE void barrier_arrive(int id, int threads) { host::named_barrier(id, threads, false); }
DEVICE void wave_sync() {
  host::meet_wave("wave_sync", 0, [](void* const*) {}, nullptr);
}

template <class T>
struct Shuffle {
  T x, received;
  int mask;
};
template <class T>
DEVICE T exchange(T x, int mask) {
  Shuffle<T> mine{x, T{}, mask};
  const auto exchange = [](void* const* payloads) {
    for (int lane = 0; lane < kWave; lane++) {
      Shuffle<T>& receiver = *static_cast<Shuffle<T>*>(payloads[lane]);
      receiver.received = static_cast<const Shuffle<T>*>(payloads[lane ^ receiver.mask])->x;
    }
  };
  if (mask < 0 || mask >= kWave) host::fail("shuffle_xor(%d) leaves a wave of %d", mask, kWave);
  host::meet_wave("shuffle_xor", mask, exchange, &mine);
  return mine.received;
}
DEVICE float shuffle_xor(float x, int mask) { return exchange(x, mask); }
DEVICE unsigned shuffle_xor(unsigned x, int mask) { return exchange(x, mask); }

DEVICE unsigned shuffle(unsigned x, int lane) {
  struct Asked {
    unsigned x, received;
    int lane;
  };
  Asked mine{x, 0, lane};
  const auto answer = [](void* const* payloads) {
    for (int own = 0; own < kWave; own++) {
      Asked& asked = *static_cast<Asked*>(payloads[own]);
      asked.received = static_cast<const Asked*>(payloads[asked.lane])->x;
    }
  };
  if (lane < 0 || lane >= kWave) host::fail("shuffle from lane %d of a wave of %d", lane, kWave);
  host::meet_wave("shuffle", 0, answer, &mine);
  return mine.received;
}

DEVICE bool wave_any(bool predicate) {
  const auto any = [](void* const* payloads) {
    bool result = false;
    for (int lane = 0; lane < kWave; lane++) result = result || *static_cast<bool*>(payloads[lane]);
    for (int lane = 0; lane < kWave; lane++) *static_cast<bool*>(payloads[lane]) = result;
  };
  host::meet_wave("wave_any", 0, any, &predicate);
  return predicate;
}

DEVICE unsigned wave_max(unsigned x) {
  const auto largest = [](void* const* payloads) {
    unsigned result = 0;
    for (int lane = 0; lane < kWave; lane++) {
      const unsigned own = *static_cast<unsigned*>(payloads[lane]);
      result = own > result ? own : result;
    }
    for (int lane = 0; lane < kWave; lane++) *static_cast<unsigned*>(payloads[lane]) = result;
  };
  host::meet_wave("wave_max", 0, largest, &x);
  return x;
}

DEVICE int wave_count(bool predicate) {
  int mine = predicate;
  const auto count = [](void* const* payloads) {
    int sum = 0;
    for (int lane = 0; lane < kWave; lane++) sum += *static_cast<int*>(payloads[lane]);
    for (int lane = 0; lane < kWave; lane++) *static_cast<int*>(payloads[lane]) = sum;
  };
  host::meet_wave("wave_count", 0, count, &mine);
  return mine;
}

DEVICE int wave_uniform(int x) {
  const auto same = [](void* const* payloads) {
    const int first = *static_cast<const int*>(payloads[0]);
    for (int lane = 1; lane < kWave; lane++) {
      const int other = *static_cast<const int*>(payloads[lane]);
      if (other != first) host::fail("wave_uniform of %d in lane 0 and %d in lane %d", first, other, lane);
    }
  };
  host::meet_wave("wave_uniform", 0, same, &x);
  return x;
}

DEVICE float exp2(float x) { return ::exp2f(x); }
DEVICE float log2(float x) { return ::log2f(x); }
DEVICE float quick_log2(float x) { return ::log2f(x); }
DEVICE float exp(float x) { return ::expf(x); }
DEVICE float log(float x) { return ::logf(x); }
DEVICE float sin(float x) { return ::sinf(x); }
DEVICE float cos(float x) { return ::cosf(x); }
DEVICE float sqrt(float x) { return ::sqrtf(x); }
DEVICE float floor(float x) { return ::floorf(x); }
DEVICE float fmod(float x, float y) { return ::fmodf(x, y); }
DEVICE float pow(float x, float y) { return ::powf(x, y); }
DEVICE float tanh(float x) { return ::tanhf(x); }
DEVICE float reciprocal(float x) { return 1.0f / x; }

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(float16 x) {
  const unsigned sign = (x.bits & 0x8000u) << 16;
  const unsigned magnitude = (x.bits & 0x7fffu) << 13;
  // A product rebases the exponent, also of subnormal numbers. Infinity and NaN keep the largest exponent.
  const unsigned rebased = bits_of(float_of(magnitude) * 0x1p112f);
  return float_of(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : rebased));
}
DEVICE float to_float(bfloat16 x) { return float_of(static_cast<unsigned>(x.bits) << 16); }
DEVICE float to_float(float8 x) {
  const unsigned sign = (x.bits & 0x80u) << 24, magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7fu) return float_of(sign | 0x7fc00000u);
  return float_of(sign | bits_of(float_of(magnitude << 20) * 0x1p120f));
}

// Conversions round to nearest, ties to even.
template <class T>
DEVICE T from_float(float x);
template <>
DEVICE float from_float<float>(float x) {
  return x;
}
template <>
DEVICE float16 from_float<float16>(float x) {
  const unsigned bits = bits_of(x);
  const unsigned sign = bits >> 16 & 0x8000u;
  const unsigned magnitude = bits & 0x7fffffffu;
  unsigned half;
  if (magnitude > 0x7f800000u) {
    half = 0x7fffu;
  } else if (magnitude >= 0x47800000u) {  // 2^16
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // 2^-14
    // The last bit of 1/2 is 2^-24, a step of subnormal float16. So adding 1/2 rounds the number to such steps, and
    // leaves the subnormal's bits in the last ones.
    half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return {static_cast<unsigned short>(sign | half)};
}
template <>
DEVICE bfloat16 from_float<bfloat16>(float x) {
  const unsigned bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fffu};
  return {static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <>
DEVICE float8 from_float<float8>(float x) {
  return float8_of_float_bits(bits_of(x));
}

// Converts the four float8 of x to float16.
DEVICE void float16_pairs(unsigned (&pairs)[2], unsigned x) {
  pairs[0] = pairs[1] = 0;
  for (int i = 0; i < 4; i++) {
    const float16 y = from_float<float16>(to_float(float8{static_cast<unsigned char>(x >> i * 8)}));
    pairs[i / 2] |= static_cast<unsigned>(y.bits) << i % 2 * 16;
  }
}

template <int kBytes>
DEVICE void copy_async(void* shared, const void* global, bool valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "the sizes that cp.async has");
  host::copy_later(shared, global, kBytes, valid);
}
template <int kBytes>
DEVICE void copy_async(unsigned shared, const void* global, bool valid) {
  copy_async<kBytes>(static_cast<void*>(host::shared_pointer(shared)), global, valid);
}
template <int kBytes>
DEVICE void copy_async_evict_first(unsigned shared, const void* global, bool valid) {
  copy_async<kBytes>(shared, global, valid);
}
DEVICE void copy_async_commit() { host::commit_copies(); }
template <int kPending = 0>
DEVICE void copy_async_wait() {
  host::perform_copies(kPending);
}

DEVICE void prefetch(const void*) {}

// Blocks run one after the other, so plain additions will do.
template <int kCount>
DEVICE void atomic_add(float* address, const float (&x)[kCount]) {
  if (reinterpret_cast<unsigned long long>(address) % sizeof(x) != 0)
    host::fail("%d floats are added to %p", kCount, static_cast<void*>(address));
  for (int i = 0; i < kCount; i++) address[i] += x[i];
}

DEVICE void atomic_add(unsigned long long* address, unsigned long long x) { *address += x; }

DEVICE void store_streaming(void* address, const unsigned (&x)[4]) {
  if (reinterpret_cast<unsigned long long>(address) % sizeof(x) != 0) host::fail("16 bytes are stored to %p", address);
  __builtin_memcpy(address, x, sizeof(x));
}

template <class T>
DEVICE void add_pairs(T* address, const unsigned (&x)[4]) {
  if (reinterpret_cast<unsigned long long>(address) % sizeof(x) != 0) host::fail("pairs are added to %p", address);
  for (int i = 0; i < 8; i++) {
    const T added{static_cast<unsigned short>(x[i / 2] >> i % 2 * 16)};
    address[i] = from_float<T>(to_float(address[i]) + to_float(added));
  }
}

DEVICE void fence_device() {}

DEVICE unsigned fetch_add(unsigned* counter, unsigned x) {
  const unsigned was = *counter;
  *counter += x;
  return was;
}

DEVICE unsigned fetch_add_acq_rel(unsigned* counter, unsigned x) { return fetch_add(counter, x); }
DEVICE void add_release(unsigned* counter, unsigned x) { *counter += x; }
DEVICE unsigned load_acquire(const unsigned* counter) { return *counter; }
DEVICE unsigned fetch_increment_deferred(unsigned* counter) { return fetch_add(counter, 1u); }

DEVICE unsigned shared_address(const void* pointer) { return host::shared_address(pointer); }
DEVICE void stmatrix(void* row, const unsigned (&r)[4]) { host::stmatrix(row, r); }

}  // namespace target
