// The simulator's interface: runs a kernel that was compiled against target/host.cuh.
#pragma once

#include <stddef.h>

namespace host {

// Bytes that a kernel before this one writes at its end. Each cluster finds them as they were before, until one of its
// threads waits for earlier kernels.
struct LateWrite {
  void* to;
  const void* before;
  const void* after;
  size_t bytes;
};

struct Launch {
  void (*kernel)(const void* const* params);
  const void* const* params;
  int grid, cluster;  // blocks of the grid, and blocks of one cluster
  int threads, wave, shared_bytes;
  unsigned seed;  // of the random order in which waves and lanes run and copies arrive
  const LateWrite* late;
  int late_count;
};

// Runs all blocks in a child process, so that a crash or a deadlock of the kernel ends only that process. Returns 0, or
// 1 with the reason in `report`.
int run(const Launch& launch, char* report, int report_bytes);

// Calls the kernel from a constructor, since the arguments in the braces of `call` are evaluated from left to right:
// each takes the next entry of `params`.
template <class... Params>
struct Call {
  Call(void (*kernel)(Params...), const Params&... params) { kernel(params...); }
};
template <class Param>
Param value_at(const void* bytes) {
  Param value;
  __builtin_memcpy(&value, bytes, sizeof(value));
  return value;
}
template <class... Params>
void call(void (*kernel)(Params...), const void* const* params) {
  Call<Params...>{kernel, value_at<Params>(*params++)...};
}

template <class... Params>
int bytes_of(void (*)(Params...), int parameter) {
  const int bytes[] = {static_cast<int>(sizeof(Params))...};
  return parameter < static_cast<int>(sizeof...(Params)) ? bytes[parameter] : 0;
}

}  // namespace host

// The functions that Python calls. All other symbols are hidden (-fvisibility=hidden): libraries of several kernels are
// loaded into one process and define the same names.
#define SHIM_EXPORT extern "C" __attribute__((visibility("default")))
#define SHIM_ENTRY(kernel)                                                                                  \
  SHIM_EXPORT int shim_parameter_bytes(int parameter) { return host::bytes_of(kernel, parameter); }         \
  SHIM_EXPORT int shim_run(const void* const* params, int grid, int cluster, int threads, int shared_bytes, \
                           unsigned seed, const host::LateWrite* late, int late_count, char* report,        \
                           int report_bytes) {                                                              \
    const auto run_one = [](const void* const* p) { host::call(kernel, p); };                               \
    const host::Launch launch{run_one,      params,       grid, cluster, threads,                           \
                              RAWATTN_WAVE, shared_bytes, seed, late,    late_count};                       \
    return host::run(launch, report, report_bytes);                                                         \
  }
