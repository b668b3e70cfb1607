// Runs a kernel compiled for target/host.cuh.
#pragma once

namespace host {

struct Launch {
  void (*kernel)(const void* const* params);
  const void* const* params;
  int grid, cluster;  // blocks, and how many of them run together
  int threads, wave, shared_bytes;
  unsigned seed;  // of the order in which waves and lanes take turns
};

// Runs the blocks in a child process, so that whatever a kernel does ends there. Returns 0, or 1
// with the reason in `report`.
int run(const Launch& launch, char* report, int report_bytes);

// A value for each parameter, in order: braces evaluate from left to right.
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

// What Python calls; all else is hidden, so that kernels loaded into one process do not share what
// has the same name.
#define SHIM_EXPORT extern "C" __attribute__((visibility("default")))
#define SHIM_ENTRY(kernel)                                                                                  \
  SHIM_EXPORT int shim_parameter_bytes(int parameter) { return host::bytes_of(kernel, parameter); }         \
  SHIM_EXPORT int shim_run(const void* const* params, int grid, int cluster, int threads, int shared_bytes, \
                           unsigned seed, char* report, int report_bytes) {                                 \
    const auto run_one = [](const void* const* p) { host::call(kernel, p); };                               \
    const host::Launch launch{run_one, params, grid, cluster, threads, RAWATTN_WAVE, shared_bytes, seed};   \
    return host::run(launch, report, report_bytes);                                                         \
  }
