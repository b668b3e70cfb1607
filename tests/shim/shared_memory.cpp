// The running block's shared memory: addresses, offsets and the checks that an access stays inside.
#include "inside.hpp"
#include "machine.hpp"
#include "target/host.cuh"

namespace host {

unsigned char* shared_memory(int bytes, int alignment) {
  if (bytes > launch.shared_bytes) fail("uses %d bytes of shared memory, launched with %d", bytes, launch.shared_bytes);
  if (alignment > static_cast<int>(kSharedAddress)) fail("shared memory starts on no multiple of %d", alignment);
  return blocks[rank].shared;
}

unsigned shared_address(const void* pointer) {
  return kSharedAddress + static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - blocks[rank].shared);
}

unsigned char* shared_pointer(unsigned address) {
  return blocks[rank].shared + (static_cast<long long>(address) - kSharedAddress);
}

size_t offset_in_shared(const void* pointer, size_t bytes, size_t alignment, const char* what) {
  const size_t offset = static_cast<const unsigned char*>(pointer) - blocks[rank].shared;
  const size_t room = launch.shared_bytes;
  if (offset > room || bytes > room - offset || offset % alignment != 0) {
    fail("%s: %zu bytes at byte %lld of %zu of shared memory; multiples of %zu are right", what, bytes,
         static_cast<long long>(offset), room, alignment);
  }
  return offset;
}

size_t offset_of_address(unsigned address, size_t bytes, const char* what) {
  return offset_in_shared(shared_pointer(address), bytes, 1, what);
}

void check_reaches(int to, const char* what) {
  if (to < 0 || to >= launch.cluster) fail("%s: block %d of a cluster of %d", what, to, launch.cluster);
  if (blocks[to].threads == 0) fail("%s: block %d of the cluster has exited", what, to);
}

}  // namespace host
