// The copy engine: boxes of a tensor travel to shared memory, which is NaN until they arrive.
#include <string.h>

#include <vector>

#include "inside.hpp"
#include "ptx/host.cuh"

namespace host {
namespace {

constexpr int kRank = 5;
constexpr size_t kRow = 128;  // bytes of a box that are contiguous, in the 128-byte swizzle

struct TensorCopy {
  unsigned char* shared;
  size_t place;
  ptx::TensorMap map;
  void* barrier;
  int coordinates[kRank];
  int thread;  // that asked for it

  size_t rows() const {
    size_t rows = 1;
    for (int axis = 1; axis < kRank; axis++) rows *= map.box[axis];
    return rows;
  }
  size_t bytes() const { return rows() * kRow; }
};

std::vector<TensorCopy> under_way;

// Where a byte of a box lies: among the 128 bytes of a row, the eight pieces of 16 are exchanged as
// the row's place among eight says. It is the address that counts, not the place in the box.
unsigned char* swizzled(unsigned char* pointer) {
  const unsigned address = shared_address(pointer);
  return pointer + static_cast<int>((address ^ ((address >> 7 & 7) << 4)) - address);
}

void copy_row(const TensorCopy& copy, unsigned char* row, const long long (&index)[kRank]) {
  const ptx::TensorMap& map = copy.map;
  alignas(16) unsigned char bytes[kRow] = {};
  bool inside = true;
  const unsigned char* from = reinterpret_cast<const unsigned char*>(map.address);
  for (int axis = 1; axis < kRank; axis++) {
    inside = inside && index[axis] >= 0 && index[axis] < static_cast<long long>(map.dims[axis]);
    from += index[axis] * static_cast<long long>(map.strides[axis - 1]);
  }
  const long long columns = static_cast<long long>(map.dims[0]) - index[0];  // from the box's first
  const long long begin = index[0] < 0 ? -index[0] : 0;
  const long long end = columns < map.box[0] ? columns : map.box[0];
  if (inside && begin < end) {
    memcpy(bytes + begin * map.itemsize, from + (index[0] + begin) * map.itemsize, (end - begin) * map.itemsize);
  }
  for (size_t piece = 0; piece < kRow; piece += 16) memcpy(swizzled(row + piece), bytes + piece, 16);
}

}  // namespace

void copy_tensor(void* to, const ptx::TensorMap& map, void* barrier, const int (&coordinates)[5]) {
  TensorCopy copy{static_cast<unsigned char*>(to), 0, map, barrier, {}, running};
  memcpy(copy.coordinates, coordinates, sizeof(coordinates));
  if (map.box[0] * map.itemsize != kRow) fail("copy_tensor: boxes of the 128-byte swizzle are that wide here");
  // The engine wants 128 bytes; products want the 1024 after which the swizzle repeats.
  copy.place = place_in_shared(to, copy.bytes(), 1024, "copy_tensor");
  check_mbarrier(barrier);
  const size_t end = copy.place + copy.bytes();
  if (product_touches(copy.place, end)) {
    fail("copy_tensor: bytes %zu to %zu of shared memory are the operand of a product under way", copy.place, end);
  }
  if (copy_touches(copy.place, end)) {
    fail("copy_tensor: another copy to bytes %zu to %zu of shared memory is under way", copy.place, end);
  }
  memset(to, kPoison, copy.bytes());
  under_way.push_back(copy);
}

size_t copies_under_way() { return under_way.size(); }

bool copy_touches(size_t begin, size_t end) {
  for (const TensorCopy& copy : under_way) {
    if (begin < copy.place + copy.bytes() && copy.place < end) return true;
  }
  return false;
}

// Copies arrive in any order. What lies outside the tensor arrives as zeros, is not read, and counts.
void deliver_copy() {
  const unsigned chosen = draw(static_cast<unsigned>(under_way.size()));
  const TensorCopy copy = under_way[chosen];
  under_way.erase(under_way.begin() + chosen);
  running = copy.thread;
  unsigned char* row = copy.shared;
  for (size_t n = 0; n < copy.rows(); n++, row += kRow) {
    for (size_t i = 0; i < kRow; i++) {
      if (row[i] != kPoison)
        fail("byte %zu of shared memory was written while a copy was on its way there", i + copy.place + n * kRow);
    }
    long long index[kRank];
    index[0] = copy.coordinates[0];
    size_t rest = n;
    for (int axis = 1; axis < kRank; axis++) {
      index[axis] = copy.coordinates[axis] + static_cast<long long>(rest % copy.map.box[axis]);
      rest /= copy.map.box[axis];
    }
    copy_row(copy, row, index);
  }
  complete_bytes(copy.barrier, static_cast<unsigned>(copy.bytes()));
  running = -1;
}

}  // namespace host
