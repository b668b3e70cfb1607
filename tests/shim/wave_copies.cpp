// Asynchronous copies that each lane issues (cp.async). The destination is NaN until the copy has been waited for.
#include <string.h>

#include <vector>

#include "inside.hpp"
#include "machine.hpp"
#include "target/host.cuh"

namespace host {

namespace {

struct Copy {
  void* shared;
  const void* global;
  int bytes, readable;  // the `readable` first of `bytes` are copied, the rest becomes 0
};
struct Copies {
  std::vector<Copy> copies;
  std::vector<size_t> groups;  // the number of copies at each commit: where each group ends
};
std::vector<Copies> by_thread;

}  // namespace

void forget_wave_copies(size_t threads) { by_thread.assign(threads, {}); }
void check_wave_copies_at_exit() {
  const size_t left = by_thread[running].copies.size();
  if (left != 0) fail("exits while %zu of its copies were never waited for", left);
}

namespace {

void add_copy(void* to, const void* from, int bytes, int readable) {
  check_prerequisites("copies");
  const size_t offset = static_cast<unsigned char*>(to) - blocks[rank].shared;
  if (offset + bytes > static_cast<size_t>(launch.shared_bytes) || offset % bytes != 0) {
    fail("copies %d bytes to byte %lld of %d of shared memory", bytes, static_cast<long long>(offset),
         launch.shared_bytes);
  }
  if (readable < 0 || readable > bytes) fail("copies %d of %d bytes", readable, bytes);
  if (readable > 0 && reinterpret_cast<size_t>(from) % bytes != 0)
    fail("copies %d bytes from %p, which is not aligned", bytes, from);
  memset(to, kPoison, bytes);
  by_thread[running].copies.push_back({to, from, bytes, readable});
}

}  // namespace

void copy_later(void* to, const void* from, int bytes, bool valid) { add_copy(to, from, bytes, valid ? bytes : 0); }
void copy_partly_later(void* to, const void* from, int readable) { add_copy(to, from, 16, readable); }

void commit_copies() { by_thread[running].groups.push_back(by_thread[running].copies.size()); }

void perform_copies(int pending) {
  Copies& self = by_thread[running];
  if (self.groups.size() <= static_cast<size_t>(pending)) return;
  const size_t done = self.groups.size() - pending;
  const size_t count = self.groups[done - 1];
  for (size_t i = 0; i < count; i++) {
    const Copy& copy = self.copies[i];
    memset(copy.shared, 0, copy.bytes);
    if (copy.readable > 0) memcpy(copy.shared, copy.global, copy.readable);
  }
  self.copies.erase(self.copies.begin(), self.copies.begin() + count);
  self.groups.erase(self.groups.begin(), self.groups.begin() + done);
  for (size_t& end : self.groups) end -= count;
}

}  // namespace host
