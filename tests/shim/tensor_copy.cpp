// What travels to shared memory, which is NaN until it arrives: the copy engine's boxes of a tensor, and numbers that a
// block sends to another one of its cluster.
#include <string.h>

#include <vector>

#include "inside.hpp"
#include "ptx/host.cuh"

namespace host {
namespace {

constexpr int kRank = 5;
constexpr size_t kRow = 128;  // bytes of a box that are contiguous, in the 128-byte swizzle

struct Box {
  ptx::TensorMap map;
  int coordinates[kRank];

  size_t rows() const {
    size_t rows = 1;
    for (int axis = 1; axis < kRank; axis++) rows *= map.box[axis];
    return rows;
  }
  bool misses_map() const {
    for (int axis = 0; axis < kRank; axis++) {
      const long long first = coordinates[axis];
      if (first >= static_cast<long long>(map.dims[axis]) || first + map.box[axis] <= 0) return true;
    }
    return false;
  }
};

struct Copy {
  const char* name;
  int rank, thread;  // that asked for it
  int to;            // the rank of the block that receives it
  size_t place, bytes, barrier;
  Box box;        // without rows where a number comes
  unsigned sent;  // the number
};

std::vector<Copy> under_way;

// Where a byte of a box lies: among the 128 bytes of a row, the eight pieces of 16 are exchanged as
// the row's place among eight says. It is the address that counts, not the place in the box.
size_t swizzled(size_t place) {
  const size_t address = place + kSharedAddress;
  return (address ^ ((address >> 7 & 7) << 4)) - kSharedAddress;
}

void copy_row(const ptx::TensorMap& map, unsigned char* shared, size_t row, const long long (&index)[kRank]) {
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
  for (size_t piece = 0; piece < kRow; piece += 16) memcpy(shared + swizzled(row + piece), bytes + piece, 16);
}

// What lies outside the tensor arrives as zeros, is not read, and counts.
void copy_box(const Box& box, unsigned char* shared, size_t place) {
  for (size_t n = 0; n < box.rows(); n++) {
    long long index[kRank];
    index[0] = box.coordinates[0];
    size_t rest = n;
    for (int axis = 1; axis < kRank; axis++) {
      index[axis] = box.coordinates[axis] + static_cast<long long>(rest % box.map.box[axis]);
      rest /= box.map.box[axis];
    }
    copy_row(box.map, shared, place + n * kRow, index);
  }
}

void set_out(const Copy& copy) {
  const size_t end = copy.place + copy.bytes;
  if (product_touches(copy.to, copy.place, end)) {
    fail("%s: bytes %zu to %zu of shared memory are the operand of a product under way", copy.name, copy.place, end);
  }
  if (copies_to(copy.to, copy.place, end) != 0) {
    fail("%s: another copy to bytes %zu to %zu of shared memory is under way", copy.name, copy.place, end);
  }
  memset(blocks[copy.to].shared + copy.place, kPoison, copy.bytes);
  under_way.push_back(copy);
}

}  // namespace

void copy_tensor(void* pointer, const ptx::TensorMap& map, void* barrier, const int (&coordinates)[5], int receivers) {
  if (map.box[0] * map.itemsize != kRow) fail("copy_tensor: boxes of the 128-byte swizzle are that wide here");
  Copy copy{"copy_tensor", rank, running, rank, 0, 0, 0, {map, {}}, 0};
  memcpy(copy.box.coordinates, coordinates, sizeof(coordinates));
  copy.bytes = copy.box.rows() * kRow;
  // Seen on a GPU: the launch ended with an illegal access, where maps of ragged batches begin before their array.
  if (map.origin != 0 && copy.box.misses_map()) {
    fail("copy_tensor: for a box wholly outside, the engine touches the map's origin, %lld bytes from the array",
         map.origin);
  }
  // The engine wants 128 bytes; products want the 1024 after which the swizzle repeats.
  copy.place = place_in_shared(pointer, copy.bytes, 1024, copy.name);
  // Each receiver's arrives at a time of its own.
  for (int n = 0; n < receivers; n++) {
    if (receivers > 1) copy.to = n;
    copy.barrier = check_mbarrier(barrier, copy.to, copy.name);
    set_out(copy);
  }
}

void send(void* pointer, unsigned x, void* barrier, int to) {
  const size_t place = place_in_shared(pointer, sizeof(x), sizeof(x), "send");
  set_out({"send", rank, running, to, place, sizeof(x), check_mbarrier(barrier, to, "send"), {}, x});
}

size_t copies_under_way() { return under_way.size(); }

size_t copies_to(int to, size_t begin, size_t end) {
  size_t count = 0;
  for (const Copy& copy : under_way) {
    if (copy.to == to && begin < copy.place + copy.bytes && copy.place < end) count++;
  }
  return count;
}

// Copies arrive in any order.
void deliver_copy() {
  const unsigned chosen = draw(static_cast<unsigned>(under_way.size()));
  const Copy copy = under_way[chosen];
  under_way.erase(under_way.begin() + chosen);
  rank = copy.rank;
  running = copy.thread;
  unsigned char* const shared = blocks[copy.to].shared;
  for (size_t i = copy.place; i < copy.place + copy.bytes; i++) {
    if (shared[i] != kPoison) fail("byte %zu of shared memory was written while a copy was on its way there", i);
  }
  if (copy.box.rows() == 0) {
    memcpy(shared + copy.place, &copy.sent, copy.bytes);
  } else {
    copy_box(copy.box, shared, copy.place);
  }
  complete_bytes(copy.to, copy.barrier, static_cast<unsigned>(copy.bytes), copy.name);
  running = -1;
}

}  // namespace host
