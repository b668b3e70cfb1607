// Hopper's instructions on the host, for tests. Each calls the simulated GPU of tests/shim, which does what the PTX
// manual says, but performs asynchronous operations late and reports misuse (tests/shim/mbarrier.cpp, tensor_copy.cpp,
// warp_group.cpp). The functions are those of the other files of ptx/, which describe them.
#pragma once

#include "ptx/descriptor.cuh"
#include "target/host.cuh"

static_assert(RAWATTN_WAVE == 32, "NVIDIA's warps");

namespace ptx {

typedef unsigned long long Mbarrier;

// A tensor map in plain fields, in place of the driver's opaque encoding; written by tests/shim/tensor_map.py.
// Innermost axis first. Strides are in bytes, and the innermost axis has none.
struct alignas(64) TensorMap {
  unsigned long long address;
  unsigned long long dims[5];
  unsigned long long strides[4];
  unsigned box[5];
  unsigned itemsize;
  long long origin;  // bytes from the array's first element to the map's; if not 0, the map's is outside the array
  unsigned long long unused[2];
};
static_assert(sizeof(TensorMap) == 128, "the size of the driver's");

}  // namespace ptx

namespace host {

void mbarrier_init(void* barrier, unsigned arrivals);
void fence_mbarrier_init();
// Announces `bytes` if any, then arrives.
void mbarrier_arrive(void* barrier, unsigned bytes);
void mbarrier_wait(void* barrier, unsigned parity);
int cluster_rank();
void meet_cluster();
// Both act on what lies at the same offset in the block `rank` of the cluster.
void mbarrier_arrive_at(void* barrier, int rank);
void send(void* to, unsigned x, void* barrier, int rank);
// Loads a box to this block, or to the first `receivers` blocks of the cluster.
void copy_tensor(void* shared, const ptx::TensorMap& map, void* barrier, const int (&coordinates)[5], int receivers);
void fence_async_proxy();
void store_tensor(const ptx::TensorMap& map, const void* shared, const int (&coordinates)[5]);
void commit_stores();
void wait_stores_read();
void set_registers(const char* name, int count);
void ldmatrix(unsigned (&r)[4], const void* row);
unsigned load_shared(unsigned address);
void copy_partly_later(void* shared, const void* global, int readable);

enum class Type { kFloat16, kBfloat16, kTf32 };

// A wgmma as one thread issues it: 64 x columns, 16 deep, or 8 deep in tf32.
struct Product {
  Type type;
  int columns;
  bool accumulate;
  bool a_in_registers;
  ptx::Major a_major, b_major;
  unsigned long long a, b;  // descriptors
};
// c: columns / 2 floats, which the simulated GPU holds until the wait. a: 8 elements of 16 bits, or null.
void wgmma(const Product& product, float* c, const unsigned short* a);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);

template <class T>
struct TypeOf {
  static constexpr Type kValue = Type::kFloat16;
};
template <>
struct TypeOf<bfloat16> {
  static constexpr Type kValue = Type::kBfloat16;
};

}  // namespace host

namespace ptx {

using target::barrier_arrive;
using target::barrier_sync;

DEVICE void mbarrier_init(Mbarrier* barrier, unsigned arrivals) { host::mbarrier_init(barrier, arrivals); }
DEVICE void fence_mbarrier_init() { host::fence_mbarrier_init(); }
DEVICE void mbarrier_arrive(Mbarrier* barrier) { host::mbarrier_arrive(barrier, 0); }
template <int kOffset>
DEVICE void mbarrier_arrive(unsigned address) {
  host::mbarrier_arrive(host::shared_pointer(address + kOffset), 0);
}
DEVICE void mbarrier_arrive_expect(Mbarrier* barrier, unsigned bytes) { host::mbarrier_arrive(barrier, bytes); }
DEVICE void mbarrier_arrive_behind_copies(Mbarrier* barrier) {
  host::commit_copies();
  host::perform_copies(0);
  host::mbarrier_arrive(barrier, 0);
}
DEVICE void mbarrier_wait(Mbarrier* barrier, unsigned parity) { host::mbarrier_wait(barrier, parity); }
template <int kOffset>
DEVICE void mbarrier_wait(unsigned address, unsigned parity) {
  host::mbarrier_wait(host::shared_pointer(address + kOffset), parity);
}

DEVICE int cluster_rank() { return host::cluster_rank(); }
DEVICE void cluster_sync() { host::meet_cluster(); }
DEVICE void mbarrier_arrive_at(Mbarrier* barrier, int rank) { host::mbarrier_arrive_at(barrier, rank); }
DEVICE void send(unsigned* to, unsigned x, Mbarrier* barrier, int rank) { host::send(to, x, barrier, rank); }

DEVICE unsigned ballot(bool predicate) {
  unsigned mine = predicate;
  const auto gather = [](void* const* payloads) {
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= *static_cast<unsigned*>(payloads[lane]) << lane;
    for (int lane = 0; lane < 32; lane++) *static_cast<unsigned*>(payloads[lane]) = bits;
  };
  host::meet_wave("ballot", 0, gather, &mine);
  return mine;
}

DEVICE void pin_computation(unsigned) {}
DEVICE void compiler_fence() {}

template <int kOffset>
DEVICE void ldmatrix(unsigned (&r)[4], unsigned row) {
  host::ldmatrix(r, host::shared_pointer(row + kOffset));
}

template <int kOffset>
DEVICE unsigned load_shared(unsigned address) {
  return host::load_shared(address + kOffset);
}
DEVICE void copy_async_partly(unsigned shared, const void* global, int readable) {
  host::copy_partly_later(host::shared_pointer(shared), global, readable);
}

template <int kRegisters>
DEVICE void setmaxnreg_dec() {
  host::set_registers("setmaxnreg_dec", kRegisters);
}
template <int kRegisters>
DEVICE void setmaxnreg_inc() {
  host::set_registers("setmaxnreg_inc", kRegisters);
}

DEVICE void prefetch_tensormap(const TensorMap*) {}
DEVICE void prefetch_tensor_5d(const TensorMap*, int, int, int, int, int) {}
template <int kReceivers = 1>
DEVICE void copy_tensor_5d(void* shared, const TensorMap* map, Mbarrier* barrier, int c0, int c1, int c2, int c3,
                           int c4) {
  host::copy_tensor(shared, *map, barrier, {c0, c1, c2, c3, c4}, kReceivers);
}

DEVICE void copy_tensor_5d_evict_first(void* shared, const TensorMap* map, Mbarrier* barrier, int c0, int c1, int c2,
                                       int c3, int c4) {
  copy_tensor_5d(shared, map, barrier, c0, c1, c2, c3, c4);
}

DEVICE void fence_async_proxy() { host::fence_async_proxy(); }
// The simulated GPU makes all accesses in order.
DEVICE void fence_acq_rel_device() {}
DEVICE void store_tensor_5d(const TensorMap* map, const void* shared, int c0, int c1, int c2, int c3, int c4) {
  host::store_tensor(*map, shared, {c0, c1, c2, c3, c4});
}
DEVICE void commit_stores() { host::commit_stores(); }
DEVICE void wait_stores() { host::wait_stores_read(); }  // the simulator reads and writes a store at once
DEVICE void wait_stores_read() { host::wait_stores_read(); }

DEVICE void wgmma_fence() { host::wgmma_fence(); }
DEVICE void wgmma_commit() { host::wgmma_commit(); }
template <int kPending>
DEVICE void wgmma_wait() {
  host::wgmma_wait(kPending);
}
template <class C, int kBlocks>
DEVICE void wgmma_results(C (&)[kBlocks]) {}

template <class T, int kColumns>
struct Wgmma {
  static_assert(sizeof(T) == 2 && kColumns % 16 == 0 && kColumns <= 256, "shapes that the kernels have");
  static constexpr host::Type kType = host::TypeOf<T>::kValue;

  template <Major kA, Major kB, class C>
  DEVICE static void ss(C (&c)[kColumns / 16], unsigned long long a, unsigned long long b, int accumulate) {
    static_assert(sizeof(c) == kColumns / 2 * sizeof(float), "128 threads share 64 rows");
    host::wgmma({kType, kColumns, accumulate != 0, false, kA, kB, a, b}, c[0].x, nullptr);
  }
  template <Major kB, class C, class A>
  DEVICE static void rs(C (&c)[kColumns / 16], const A& a, unsigned long long b) {
    static_assert(sizeof(c) == kColumns / 2 * sizeof(float) && sizeof(a) == 16, "a thread's share");
    host::wgmma({kType, kColumns, true, true, Major::K, kB, 0, b}, c[0].x, &a.x[0].bits);
  }
};
template <int kColumns>
struct WgmmaTf32 {
  template <class C>
  DEVICE static void ss(C (&c)[kColumns / 16], unsigned long long a, unsigned long long b) {
    static_assert(sizeof(c) == kColumns / 2 * sizeof(float), "a thread's share");
    host::wgmma({host::Type::kTf32, kColumns, true, false, Major::K, Major::K, a, b}, c[0].x, nullptr);
  }
};

}  // namespace ptx
