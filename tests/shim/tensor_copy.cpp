// Asynchronous transfers. TMA loads of boxes, and numbers that a block sends to another block of its cluster: the
// destination in shared memory is NaN until they arrive. TMA stores of boxes: shared memory is read at some time
// between the store and its wait, and the threads that wrote it must have called fence_async_proxy.
#include <string.h>

#include <algorithm>
#include <vector>

#include "inside.hpp"
#include "ptx/host.cuh"

namespace host {
namespace {

constexpr int kRank = 5;
constexpr size_t kRow = 128;  // bytes of a box's innermost axis, in the 128-byte swizzle

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
  int rank, thread;  // the block and thread that issued it
  int to;            // the rank of the block that receives it
  size_t offset, bytes, barrier;
  Box box;        // has no rows if a number was sent
  unsigned sent;  // the number
};

struct Store {
  int rank, thread;  // the block and thread that issued it
  size_t offset;
  Box box;
  std::vector<unsigned char> asked;  // the bytes of shared memory when it was issued
  bool committed, done;
};

// Bytes that a thread has written with stmatrix and not fenced.
struct Written {
  int rank, thread;
  size_t offset, bytes;
};

std::vector<Copy> under_way;
std::vector<Store> stores;  // issued and not waited for
std::vector<Written> unfenced;

template <class T, class Which>
void erase_if(std::vector<T>& all, Which which) {
  all.erase(std::remove_if(all.begin(), all.end(), which), all.end());
}

// The offset in shared memory of a byte of a box, with the 128-byte swizzle: the index of a 16-byte piece in its row of
// 128 bytes is XORed with the row's number modulo 8. The row's number is taken from the address, not from the offset in
// the box.
size_t swizzled(size_t offset) {
  const size_t address = offset + kSharedAddress;
  return (address ^ ((address >> 7 & 7) << 4)) - kSharedAddress;
}

// The part of a box's row that lies inside the tensor: its address in the tensor, its first byte in the row and its
// size. The size is 0 for a row that lies outside.
struct Inside {
  unsigned char* tensor;
  size_t begin, bytes;
};
Inside inside_row(const Box& box, size_t n) {
  const ptx::TensorMap& map = box.map;
  unsigned char* tensor = reinterpret_cast<unsigned char*>(map.address);
  for (int axis = 1; axis < kRank; axis++) {
    const long long index = box.coordinates[axis] + static_cast<long long>(n % map.box[axis]);
    n /= map.box[axis];
    if (index < 0 || index >= static_cast<long long>(map.dims[axis])) return {nullptr, 0, 0};
    tensor += index * static_cast<long long>(map.strides[axis - 1]);
  }
  const long long first = box.coordinates[0];
  const long long columns = static_cast<long long>(map.dims[0]) - first;
  const long long begin = first < 0 ? -first : 0;
  const long long end = columns < map.box[0] ? columns : map.box[0];
  if (begin >= end) return {nullptr, 0, 0};
  return {tensor + (first + begin) * map.itemsize, begin * map.itemsize, (end - begin) * map.itemsize};
}

// Elements outside the tensor are not read, arrive as zeros, and count in the bytes of the mbarrier.
void copy_box(const Box& box, unsigned char* shared, size_t offset) {
  for (size_t n = 0; n < box.rows(); n++) {
    unsigned char bytes[kRow] = {};
    const Inside inside = inside_row(box, n);
    if (inside.bytes != 0) memcpy(bytes + inside.begin, inside.tensor, inside.bytes);
    for (size_t piece = 0; piece < kRow; piece += 16) {
      memcpy(shared + swizzled(offset + n * kRow + piece), bytes + piece, 16);
    }
  }
}

// Elements outside the tensor are not written.
void store_box(const Box& box, const unsigned char* shared, size_t offset) {
  for (size_t n = 0; n < box.rows(); n++) {
    unsigned char bytes[kRow];
    for (size_t piece = 0; piece < kRow; piece += 16) {
      memcpy(bytes + piece, shared + swizzled(offset + n * kRow + piece), 16);
    }
    const Inside inside = inside_row(box, n);
    if (inside.bytes != 0) memcpy(inside.tensor, bytes + inside.begin, inside.bytes);
  }
}

// The box that the running thread asks for; fails if a GPU could not transfer it.
Box check_box(const char* name, const ptx::TensorMap& map, const int (&coordinates)[kRank]) {
  if (map.box[0] * map.itemsize != kRow) fail("%s: boxes of the 128-byte swizzle are that wide here", name);
  Box box{map, {}};
  memcpy(box.coordinates, coordinates, sizeof(coordinates));
  // Seen on a GPU: such a box ended the launch with an illegal access, since the maps of ragged batches begin before
  // their array.
  if (map.origin != 0 && box.misses_map()) {
    fail("%s: for a box wholly outside, the engine touches the map's origin, %lld bytes from the array", name,
         map.origin);
  }
  return box;
}

bool overlap(size_t begin, size_t end, size_t offset, size_t bytes) { return begin < offset + bytes && offset < end; }

void do_store(Store& store) {
  const unsigned char* const shared = blocks[store.rank].shared;
  rank = store.rank;
  running = store.thread;
  for (size_t i = 0; i < store.asked.size(); i++) {
    if (shared[store.offset + i] == store.asked[i]) continue;
    fail("byte %zu of shared memory was written while a store still reads it", store.offset + i);
  }
  store_box(store.box, shared, store.offset);
  store.done = true;
}

void set_out(const Copy& copy) {
  const size_t end = copy.offset + copy.bytes;
  if (product_touches(copy.to, copy.offset, end)) {
    fail("%s: bytes %zu to %zu of shared memory are the operand of a product under way", copy.name, copy.offset, end);
  }
  if (copies_to(copy.to, copy.offset, end) != 0) {
    fail("%s: another copy to bytes %zu to %zu of shared memory is under way", copy.name, copy.offset, end);
  }
  for (const Store& store : stores) {
    if (store.rank == copy.to && !store.done && overlap(copy.offset, end, store.offset, store.asked.size())) {
      fail("%s: a store still reads bytes %zu to %zu of shared memory", copy.name, copy.offset, end);
    }
  }
  memset(blocks[copy.to].shared + copy.offset, kPoison, copy.bytes);
  under_way.push_back(copy);
}

}  // namespace

void copy_tensor(void* pointer, const ptx::TensorMap& map, void* barrier, const int (&coordinates)[5], int receivers) {
  check_prerequisites("copy_tensor");
  Copy copy{"copy_tensor", rank, running, rank, 0, 0, 0, check_box("copy_tensor", map, coordinates), 0};
  copy.bytes = copy.box.rows() * kRow;
  // TMA requires 128 bytes; wgmma requires the 1024 bytes after which the swizzle repeats.
  copy.offset = offset_in_shared(pointer, copy.bytes, 1024, copy.name);
  // A multicast is one copy for each receiver, so that they arrive at different times.
  for (int n = 0; n < receivers; n++) {
    if (receivers > 1) copy.to = n;
    copy.barrier = check_mbarrier(barrier, copy.to, copy.name);
    set_out(copy);
  }
}

void send(void* pointer, unsigned x, void* barrier, int to) {
  const size_t offset = offset_in_shared(pointer, sizeof(x), sizeof(x), "send");
  set_out({"send", rank, running, to, offset, sizeof(x), check_mbarrier(barrier, to, "send"), {}, x});
}

void stmatrix(void* row, const unsigned (&r)[4]) {
  if (launch.wave != kWarp) fail("stmatrix in a wave of %d", launch.wave);
  struct Lane {
    unsigned char* row;
    const unsigned* r;
  } mine{static_cast<unsigned char*>(row), r};
  offset_in_shared(row, 16, 16, "stmatrix");
  // Lane 8 i + n brings the address of row n of matrix i. Lane 4 n + m has the m-th pair of elements of that row.
  const auto store = [](void* const* payloads) {
    for (int lane = 0; lane < kWarp; lane++) {
      for (int matrix = 0; matrix < 4; matrix++) {
        unsigned char* const to = static_cast<const Lane*>(payloads[8 * matrix + lane / 4])->row + lane % 4 * 4;
        memcpy(to, &static_cast<const Lane*>(payloads[lane])->r[matrix], 4);
        unfenced.push_back({rank, running + lane, offset_in_shared(to, 4, 4, "stmatrix"), 4});
      }
    }
  };
  meet_wave("stmatrix", 0, store, &mine);
}

void ldmatrix(unsigned (&r)[4], const void* row) {
  if (launch.wave != kWarp) fail("ldmatrix in a wave of %d", launch.wave);
  struct Lane {
    const unsigned char* row;
    unsigned* r;
  } mine{static_cast<const unsigned char*>(row), r};
  offset_in_shared(row, 16, 16, "ldmatrix");
  const auto load = [](void* const* payloads) {
    for (int lane = 0; lane < kWarp; lane++) {
      for (int matrix = 0; matrix < 4; matrix++) {
        const unsigned char* const from = static_cast<const Lane*>(payloads[8 * matrix + lane / 4])->row + lane % 4 * 4;
        memcpy(&static_cast<const Lane*>(payloads[lane])->r[matrix], from, 4);
      }
    }
  };
  meet_wave("ldmatrix", 0, load, &mine);
}

unsigned load_shared(unsigned address) {
  const unsigned char* const from = shared_pointer(address);
  offset_in_shared(from, 4, 4, "load_shared");
  unsigned x;
  memcpy(&x, from, 4);
  return x;
}

void fence_async_proxy() {
  erase_if(unfenced, [](const Written& it) { return it.rank == rank && it.thread == running; });
}

void store_tensor(const ptx::TensorMap& map, const void* pointer, const int (&coordinates)[5]) {
  Store store{rank, running, 0, check_box("store_tensor", map, coordinates), {}, false, false};
  const size_t bytes = store.box.rows() * kRow;
  store.offset = offset_in_shared(pointer, bytes, 1024, "store_tensor");
  const size_t end = store.offset + bytes;
  for (const Written& it : unfenced) {
    if (it.rank != rank || !overlap(store.offset, end, it.offset, it.bytes)) continue;
    fail("store_tensor: no fence_async_proxy since thread %d wrote byte %zu", it.thread, it.offset);
  }
  if (copies_to(rank, store.offset, end) != 0) {
    fail("store_tensor: a copy to bytes %zu to %zu of shared memory is under way", store.offset, end);
  }
  const unsigned char* const from = blocks[rank].shared + store.offset;
  store.asked.assign(from, from + bytes);
  stores.push_back(store);
}

void commit_stores() {
  for (Store& store : stores) store.committed = store.committed || (store.rank == rank && store.thread == running);
}

void wait_stores_read() {
  for (Store& store : stores) {
    if (store.rank == rank && store.thread == running && store.committed && !store.done) do_store(store);
  }
  erase_if(stores, [](const Store& it) { return it.rank == rank && it.thread == running && it.committed && it.done; });
}

void check_stores_at_exit() {
  for (const Store& store : stores) {
    if (store.rank != rank || store.thread != running) continue;
    fail("exits while a store was never %s", store.committed ? "waited for" : "committed");
  }
}

void forget_copies() {
  under_way.clear();
  stores.clear();
  unfenced.clear();
}

size_t copies_under_way() {
  size_t count = under_way.size();
  for (const Store& store : stores) count += !store.done;
  return count;
}

size_t copies_to(int to, size_t begin, size_t end) {
  size_t count = 0;
  for (const Copy& copy : under_way) {
    if (copy.to == to && overlap(begin, end, copy.offset, copy.bytes)) count++;
  }
  return count;
}

// Delivers one transfer under way, chosen at random.
void deliver_copy() {
  unsigned chosen = draw(static_cast<unsigned>(copies_under_way()));
  if (chosen >= under_way.size()) {
    chosen -= static_cast<unsigned>(under_way.size());
    for (Store& store : stores) {
      if (!store.done && chosen-- == 0) {
        do_store(store);
        break;
      }
    }
    running = -1;
    return;
  }
  const Copy copy = under_way[chosen];
  under_way.erase(under_way.begin() + chosen);
  rank = copy.rank;
  running = copy.thread;
  unsigned char* const shared = blocks[copy.to].shared;
  for (size_t i = copy.offset; i < copy.offset + copy.bytes; i++) {
    if (shared[i] != kPoison) fail("byte %zu of shared memory was written while a copy was on its way there", i);
  }
  if (copy.box.rows() == 0) {
    memcpy(shared + copy.offset, &copy.sent, copy.bytes);
  } else {
    copy_box(copy.box, shared, copy.offset);
  }
  complete_bytes(copy.to, copy.barrier, static_cast<unsigned>(copy.bytes), copy.name);
  running = -1;
}

}  // namespace host
