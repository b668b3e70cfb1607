// Runs a kernel compiled for target/host.cuh.
#pragma once

namespace host {

struct Launch {
  void (*kernel)(const void* params);
  const void* params;
  int grid, threads, wave, shared_bytes;
  unsigned seed;  // of the order in which waves and lanes take turns
};

// Runs the blocks in a child process, so that whatever a kernel does ends there. Returns 0, or 1
// with the reason in `report`.
int run(const Launch& launch, char* report, int report_bytes);

template <class Params>
Params params_of(void (*)(Params));

}  // namespace host

// What Python calls; all else is hidden, so that kernels loaded into one process do not share what
// has the same name.
#define SHIM_EXPORT extern "C" __attribute__((visibility("default")))
#define SHIM_ENTRY(kernel)                                                                                           \
  using ShimParams = decltype(host::params_of(kernel));                                                              \
  SHIM_EXPORT int shim_params_bytes() { return sizeof(ShimParams); }                                                 \
  SHIM_EXPORT int shim_run(const void* params, int grid, int threads, int shared_bytes, unsigned seed, char* report, \
                           int report_bytes) {                                                                       \
    const auto call = [](const void* p) { kernel(*static_cast<const ShimParams*>(p)); };                             \
    return host::run({call, params, grid, threads, RAWATTN_WAVE, shared_bytes, seed}, report, report_bytes);         \
  }
