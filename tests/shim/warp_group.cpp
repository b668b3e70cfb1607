// Operations of a whole warpgroup: asynchronous products (wgmma) and changes of the register count (setmaxnreg).
//
// A product is computed at a commit (its own or a later one) or only at its wait, at random. Until the wait its
// accumulators are NaN to the thread, and no copy may write to its operands.
#include <string.h>

#include <algorithm>
#include <vector>

#include "inside.hpp"
#include "ptx/host.cuh"

namespace host {
namespace {

constexpr int kWarps = kWarpgroup / kWarp;
constexpr int kRows = 16;  // rows of the accumulator that a warp holds: 64 in the warpgroup
constexpr int kDepth = 16;
constexpr int kMostColumns = 256;
constexpr int kElementsA = 8;
constexpr int kRegisters = 65536;  // of an SM

// A thread's accumulators while products are under way: the simulator keeps their values, and `visible` holds NaN.
struct Held {
  float* visible;
  std::vector<float> values;
  int products;  // products under way that add to them
};

// A product as one thread has issued it.
struct Request {
  Product product;
  float* c;
  const unsigned short* a_at;
  unsigned short a[kElementsA];
};

struct Lane {
  bool fenced;
  std::vector<Request> requests;  // issued and not committed
  std::vector<Held> held;
};

// A committed product of a warp: the requests of its lanes.
struct Issued {
  std::vector<Request> of_lane;
  bool computed;
};

struct Warp {
  std::vector<std::vector<Issued>> groups;  // committed and not waited for, oldest first
  size_t actions;                           // how many actions of its warpgroup's log it has done
  int registers;                            // registers of a thread; 0 = as launched
};

// An operation that all warps of a warpgroup must do, in the order of the warpgroup's log.
struct Action {
  const char* name;
  Product product;
  int registers;
};

// The state of one block.
struct Products {
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  std::vector<std::vector<Action>> logs;  // one for each warpgroup
};
std::vector<Products> products;  // by the rank of the block

std::vector<Lane>& lanes() { return products[rank].lanes; }
std::vector<Warp>& warps() { return products[rank].warps; }
std::vector<std::vector<Action>>& logs() { return products[rank].logs; }

// The accumulator layout (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"): entry i of kLane says how many
// rows and columns bit i of the lane adds, kElement the same for the bits of the element's index. Stated independently
// of the kernels' own layout maps, which it tests.
struct Step {
  int row, column;
};
constexpr Step kLane[5] = {{0, 2}, {0, 4}, {1, 0}, {2, 0}, {4, 0}};
constexpr Step kElement[7] = {{0, 1}, {8, 0}, {0, 8}, {0, 16}, {0, 32}, {0, 64}, {0, 128}};

struct Positions {
  struct {
    unsigned char row, column;
  } at[kWarp][kMostColumns / 2];

  constexpr Positions() : at() {
    for (int lane = 0; lane < kWarp; lane++) {
      for (int element = 0; element < kMostColumns / 2; element++) {
        int row = 0, column = 0;
        for (int bit = 0; bit < 5; bit++) {
          row += (lane >> bit & 1) * kLane[bit].row;
          column += (lane >> bit & 1) * kLane[bit].column;
        }
        for (int bit = 0; bit < 7; bit++) {
          row += (element >> bit & 1) * kElement[bit].row;
          column += (element >> bit & 1) * kElement[bit].column;
        }
        at[lane][element] = {static_cast<unsigned char>(row), static_cast<unsigned char>(column)};
      }
    }
  }
};
constexpr Positions kPositions;

// An operand in shared memory, decoded from its descriptor (PTX ISA, "Matrix Descriptor Format"). Operands of 16-bit
// elements have the 128-byte swizzle, operands of tf32 have none.
struct Operand {
  Type type;
  ptx::Major major;
  unsigned start, leading, stride;

  Operand(unsigned long long bits, ptx::Major major, Type type)
      : type(type),
        major(major),
        start(static_cast<unsigned>(bits & 0x3fff) << 4),
        leading(static_cast<unsigned>(bits >> 16 & 0x3fff) << 4),
        stride(static_cast<unsigned>(bits >> 32 & 0x3fff) << 4) {
    if (bits >> 62 != (type == Type::kTf32 ? 0 : 1)) fail("descriptor %#llx: of another swizzle", bits);
    if ((bits & 0x3fffc000c000c000ull) != 0) fail("descriptor %#llx: a field has grown into the next one", bits);
    // The swizzle repeats after eight rows of 128 bytes: operands must start in the first of such eight rows.
    if (type != Type::kTf32 && (start >> 7 & 7) != 0)
      fail("descriptor %#llx: starts inside of 1024 bytes that belong together", bits);
  }
  // outer: a row of A, or a column of B.
  unsigned address(unsigned outer, unsigned depth) const {
    return major == ptx::Major::K ? at(outer, depth) : at(depth, outer);
  }

  // The address without a swizzle: a core matrix is eight consecutive rows of 16 bytes, four elements of depth.
  unsigned address_of_16(unsigned row, unsigned depth) const {
    return start + row / 8 * stride + row % 8 * 16 + depth / 4 * leading + depth % 4 * 4;
  }

 private:
  // The address before the swizzle: eight rows of 128 bytes are contiguous, `stride` leads to the next eight.
  unsigned at(unsigned row, unsigned along) const {
    return start + row / 8 * stride + row % 8 * 128 + along / 64 * leading + along % 64 * 2;
  }
};

int depth_of(Type type) { return type == Type::kTf32 ? 8 : kDepth; }

float number(Type type, unsigned short bits) {
  return type == Type::kBfloat16 ? target::to_float(bfloat16{bits}) : target::to_float(float16{bits});
}

// One element of an operand. The caller has checked that its bytes lie in shared memory.
float number_of(const Operand& operand, unsigned outer, unsigned depth) {
  if (operand.type == Type::kTf32) {
    unsigned bits;
    memcpy(&bits, blocks[rank].shared + (operand.address_of_16(outer, depth) - kSharedAddress), sizeof(bits));
    return target::float_of(bits & 0xffffe000);
  }
  const unsigned address = operand.address(outer, depth);
  unsigned short bits;
  memcpy(&bits, blocks[rank].shared + ((address ^ ((address >> 7 & 7) << 4)) - kSharedAddress), sizeof(bits));
  return number(operand.type, bits);
}

// Calls visit(begin, end) for the bytes of shared memory that a warp reads.
template <class Visit>
void each_range(const Product& product, int warp, const Visit& visit) {
  const auto range = [&](unsigned address, size_t bytes) {
    const size_t begin = offset_of_address(address, bytes, "wgmma");
    visit(begin, begin + bytes);
  };
  // Visits the rows of A, or columns of B, from `first` on, `count` of the operand's `all`.
  const auto operand = [&](const Operand& x, int all, int first, int count) {
    if (x.type == Type::kTf32) {
      // compute-sanitizer assumes that the operand's elements are contiguous and distinct. Where both halves of the
      // depth are the same bytes it therefore expects twice the bytes, which must lie in shared memory too.
      offset_of_address(x.start, all * 32, "wgmma");
      for (int outer = first; outer < first + count; outer++) {
        for (int depth = 0; depth < 8; depth += 4) range(x.address_of_16(outer, depth), 16);
      }
      return;
    }
    const bool k_major = x.major == ptx::Major::K;
    const int along = k_major ? kDepth : std::min(all, 64);
    if (x.start % 128 + 2 * along > 128) {
      fail("wgmma: the %s of an operand reaches beyond its 128 bytes", k_major ? "depth" : "width");
    }
    for (int outer = first; outer < first + count; outer += k_major ? 8 : 64) {
      for (int depth = 0; depth < kDepth; depth += k_major ? kDepth : 8) range(x.address(outer, depth) & ~1023u, 1024);
    }
  };
  operand({product.b, product.b_major, product.type}, product.columns, 0, product.columns);
  if (product.a_in_registers) return;
  operand({product.a, product.a_major, product.type}, kWarps * kRows, warp % kWarps * kRows, kRows);
}

void check_operands_are_there(const Product& product, int warp) {
  each_range(product, warp, [](size_t begin, size_t end) {
    if (copies_to(rank, begin, end) != 0)
      fail("wgmma: a copy to bytes %zu to %zu of shared memory is under way", begin, end);
  });
}

Held* find_held(Lane& lane, const float* c) {
  for (Held& held : lane.held) {
    if (held.visible == c) return &held;
  }
  return nullptr;
}

void check_untouched(const Held& held) {
  const unsigned char* const bytes = reinterpret_cast<const unsigned char*>(held.visible);
  for (size_t i = 0; i < held.values.size() * sizeof(float); i++) {
    if (bytes[i] != kPoison) fail("wgmma: an accumulator was written while a product added to it");
  }
}

void compute(const Issued& issued, int warp) {
  const Product& product = issued.of_lane[0].product;
  const int columns = product.columns, depth = depth_of(product.type);
  check_operands_are_there(product, warp);
  float a[kRows][kDepth], b[kDepth][kMostColumns], c[kRows][kMostColumns];
  const Operand operand_b(product.b, product.b_major, product.type);
  for (int n = 0; n < columns; n++) {
    for (int k = 0; k < depth; k++) b[k][n] = number_of(operand_b, n, k);
  }
  if (!product.a_in_registers) {
    const Operand operand_a(product.a, product.a_major, product.type);
    for (int row = 0; row < kRows; row++) {
      for (int k = 0; k < depth; k++) a[row][k] = number_of(operand_a, warp % kWarps * kRows + row, k);
    }
  }
  for (int lane = 0; lane < kWarp; lane++) {
    const Request& request = issued.of_lane[lane];
    const auto& at = kPositions.at[lane];
    for (int e = 0; e < kElementsA && product.a_in_registers; e++) {
      a[at[e].row][at[e].column] = number(product.type, request.a[e]);
    }
    const std::vector<float>& values = find_held(lanes()[warp * kWarp + lane], request.c)->values;
    for (int e = 0; e < columns / 2; e++) c[at[e].row][at[e].column] = product.accumulate ? values[e] : 0.0f;
  }
  for (int row = 0; row < kRows; row++) {
    for (int k = 0; k < depth; k++) {
      for (int n = 0; n < columns; n++) c[row][n] += a[row][k] * b[k][n];
    }
  }
  for (int lane = 0; lane < kWarp; lane++) {
    std::vector<float>& values = find_held(lanes()[warp * kWarp + lane], issued.of_lane[lane].c)->values;
    const auto& at = kPositions.at[lane];
    for (int e = 0; e < columns / 2; e++) values[e] = c[at[e].row][at[e].column];
  }
}

// Finishes the oldest committed group of a warp: gives its threads the accumulators that no later product adds to.
void retire(int warp) {
  std::vector<std::vector<Issued>>& groups = warps()[warp].groups;
  for (Issued& issued : groups.front()) {
    if (!issued.computed) compute(issued, warp);
    for (int n = 0; n < kWarp; n++) {
      const Request& request = issued.of_lane[n];
      if (request.product.a_in_registers && memcmp(request.a_at, request.a, sizeof(request.a)) != 0) {
        fail("wgmma: A was written while a product read it");
      }
      Lane& lane = lanes()[warp * kWarp + n];
      Held* const held = find_held(lane, request.c);
      if (--held->products != 0) continue;
      check_untouched(*held);
      memcpy(held->visible, held->values.data(), held->values.size() * sizeof(float));
      lane.held.erase(lane.held.begin() + (held - lane.held.data()));
    }
  }
  groups.erase(groups.begin());
}

bool same(const Product& x, const Product& y) {
  return x.type == y.type && x.columns == y.columns && x.accumulate == y.accumulate &&
         x.a_in_registers == y.a_in_registers && x.a_major == y.a_major && x.b_major == y.b_major && x.a == y.a &&
         x.b == y.b;
}

// Called when a warp does an operation of its whole warpgroup: fails if another warp's n-th operation was another one.
void act(const Action& action) {
  const int warp = running / kWarp;
  if ((warp / kWarps + 1) * kWarpgroup > launch.threads) fail("%s outside of a whole warpgroup", action.name);
  std::vector<Action>& log = logs()[warp / kWarps];
  const size_t n = warps()[warp].actions++;
  if (n == log.size()) log.push_back(action);
  const Action& other = log[n];
  if (strcmp(other.name, action.name) != 0 || other.registers != action.registers ||
      !same(other.product, action.product)) {
    fail("warps of one warpgroup diverged: %s where another warp did %s, or with other operands", action.name,
         other.name);
  }
}

}  // namespace

void forget_products() {
  products.assign(launch.cluster, {});
  for (Products& each : products) {
    each.lanes.resize(launch.threads);
    each.warps.resize(launch.threads / launch.wave);
    each.logs.resize((launch.threads + kWarpgroup - 1) / kWarpgroup);
  }
}

void wgmma(const Product& product, float* c, const unsigned short* a) {
  Lane& lane = lanes()[running];
  if (!lane.fenced) fail("wgmma: no wgmma_fence since the last wait");
  if (running % kWarp == 0) check_operands_are_there(product, running / kWarp);
  Request request{product, c, a, {}};
  if (a != nullptr) memcpy(request.a, a, sizeof(request.a));
  const size_t count = product.columns / 2;
  Held* held = find_held(lane, c);
  if (held == nullptr) {
    lane.held.push_back({c, std::vector<float>(c, c + count), 0});
    held = &lane.held.back();
    memset(c, kPoison, count * sizeof(float));
  }
  if (held->values.size() != count) fail("wgmma: accumulators of another shape are in use");
  check_untouched(*held);
  held->products++;
  lane.requests.push_back(request);
}

void wgmma_fence() { lanes()[running].fenced = true; }

void wgmma_commit() {
  const auto commit = [](void* const*) {
    const int warp = running / kWarp;
    const Lane& first = lanes()[running];
    std::vector<Issued> group;
    for (size_t n = 0; n < first.requests.size(); n++) {
      Issued issued{{}, false};
      for (int thread = running; thread < running + kWarp; thread++) {
        const std::vector<Request>& requests = lanes()[thread].requests;
        if (requests.size() != first.requests.size() || !same(requests[n].product, first.requests[n].product)) {
          fail("threads of one warp diverged: threads %d and %d asked for different products", running, thread);
        }
        issued.of_lane.push_back(requests[n]);
      }
      act({"wgmma", first.requests[n].product, 0});
      group.push_back(issued);
    }
    for (int thread = running; thread < running + kWarp; thread++) lanes()[thread].requests.clear();
    warps()[warp].groups.push_back(group);
    if (draw(2) != 0) return;
    for (std::vector<Issued>& each : warps()[warp].groups) {
      for (Issued& issued : each) {
        if (!issued.computed) compute(issued, warp);
        issued.computed = true;
      }
    }
  };
  meet_wave("wgmma_commit", 0, commit, nullptr);
}

void wgmma_wait(int pending) {
  const auto wait = [](void* const* payloads) {
    const size_t most = *static_cast<const int*>(payloads[0]);
    const int warp = running / kWarp;
    while (warps()[warp].groups.size() > most) retire(warp);
    for (int thread = running; thread < running + kWarp; thread++) lanes()[thread].fenced = false;
  };
  meet_wave("wgmma_wait", pending, wait, &pending);
}

bool product_touches(int to, size_t begin, size_t end) {
  const Products& its = products[to];
  bool touches = false;
  const auto visit = [&](size_t first, size_t last) { touches = touches || (first < end && begin < last); };
  for (int warp = 0; warp < static_cast<int>(its.warps.size()); warp++) {
    for (const std::vector<Issued>& group : its.warps[warp].groups) {
      for (const Issued& issued : group) each_range(issued.of_lane[0].product, warp, visit);
    }
    for (const Request& request : its.lanes[warp * launch.wave].requests) each_range(request.product, warp, visit);
  }
  return touches;
}

void set_registers(const char* name, int count) {
  struct Wish {
    const char* name;
    int count;
  };
  const auto set = [](void* const* payloads) {
    const Wish& wish = *static_cast<const Wish*>(payloads[0]);
    warps()[running / kWarp].registers = wish.count;
    act({wish.name, {}, wish.count});
  };
  if (count < 24 || count > 256 || count % 8 != 0) fail("%s(%d)", name, count);
  Wish mine{name, count};
  meet_wave(name, count, set, &mine);
}

void check_products_at_exit() {
  if (!lanes()[running].requests.empty()) fail("exits with a product that was never committed");
  if (!warps()[running / launch.wave].groups.empty()) fail("exits with products that were never waited for");
}

void check_products_of_block() {
  int registers = 0;
  for (size_t warp = 0; warp < warps().size(); warp++) {
    const std::vector<Action>& log = logs()[warp * launch.wave / kWarpgroup];
    if (warps()[warp].actions != log.size()) {
      fail("warps of one warpgroup diverged: wave %zu did not come to %s", warp, log[warps()[warp].actions].name);
    }
    registers += kWarp * warps()[warp].registers;
  }
  if (registers > kRegisters) fail("the block's threads have %d registers together", registers);
}

}  // namespace host
