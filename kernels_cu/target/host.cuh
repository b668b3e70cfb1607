// A GPU made of plain C++, for tests: every thread of a block is a fiber, blocks run one after the
// other. tests/shim/machine.cpp is the machine; this is its instruction set, as waves of 32 threads
// with Ampere's fragments or of 64 with CDNA's.
//
// It is stricter than a GPU where a GPU forgives: what a thread may not rely on yet is NaN (shared
// memory at the start of a block, the destination of a copy until it was waited for), waves
// overtake each other as far as barriers let them, and threads of a wave that meet in different
// primitives stop the run.
#pragma once

// Declared here, because the C++ header costs a third of the time that a kernel takes to compile.
extern "C" {
float exp2f(float) noexcept;
float fmaf(float, float, float) noexcept;
float fmaxf(float, float) noexcept;
float log2f(float) noexcept;
}

#define DEVICE inline
#define KERNEL extern "C"
#define LAUNCH_BOUNDS(threads, blocks)
#define PARAMETER const
#define SHARED_MEMORY(name, bytes) SHARED_MEMORY_ALIGNED(name, bytes, 128)
#define SHARED_MEMORY_ALIGNED(name, bytes, alignment) unsigned char* const name = host::shared_memory(bytes, alignment)
#define UNROLL

struct float16 {
  unsigned short bits;
};
struct bfloat16 {
  unsigned short bits;
};

namespace host {

// Combines what the lanes of a wave brought along when all of them have come; payloads are in lane
// order.
using Combine = void (*)(void* const* payloads);

int thread_index();
int block_index();
int grid_size();
unsigned char* shared_memory(int bytes, int alignment);
unsigned shared_address(const void* pointer);
// Both return when every thread of the wave, or of the block, is there. `name` and `detail` say
// what the thread waits for.
void meet_wave(const char* name, int detail, Combine combine, void* payload);
void meet_block();
void copy_later(void* shared, const void* global, int bytes, bool valid);
void commit_copies();
void perform_copies();
// c += a b, all 16 x 16 and dense, with the first `depth` columns of a and rows of b.
void multiply_add(float* c, const float* a, const float* b, int depth);
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace host

namespace target {

constexpr int kWave = RAWATTN_WAVE;
static_assert(kWave == 32 || kWave == 64, "RAWATTN_WAVE is 32 or 64");

DEVICE float float_of(unsigned bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}
DEVICE unsigned bits_of(float x) {
  unsigned bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

DEVICE float infinity() { return float_of(0x7f800000); }

DEVICE int thread_index() { return host::thread_index(); }
DEVICE int block_index() { return host::block_index(); }
DEVICE unsigned grid_size() { return static_cast<unsigned>(host::grid_size()); }

DEVICE void block_sync() { host::meet_block(); }
DEVICE void wave_sync() {
  host::meet_wave("wave_sync", 0, [](void* const*) {}, nullptr);
}

template <class T>
struct Shuffle {
  T x, received;
  int mask;
};
template <class T>
DEVICE T exchange(T x, int mask) {
  Shuffle<T> mine{x, T{}, mask};
  const auto exchange = [](void* const* payloads) {
    for (int lane = 0; lane < kWave; lane++) {
      Shuffle<T>& receiver = *static_cast<Shuffle<T>*>(payloads[lane]);
      receiver.received = static_cast<const Shuffle<T>*>(payloads[lane ^ receiver.mask])->x;
    }
  };
  if (mask < 0 || mask >= kWave) host::fail("shuffle_xor(%d) leaves a wave of %d", mask, kWave);
  host::meet_wave("shuffle_xor", mask, exchange, &mine);
  return mine.received;
}
DEVICE float shuffle_xor(float x, int mask) { return exchange(x, mask); }
DEVICE unsigned shuffle_xor(unsigned x, int mask) { return exchange(x, mask); }

DEVICE bool wave_any(bool predicate) {
  const auto any = [](void* const* payloads) {
    bool result = false;
    for (int lane = 0; lane < kWave; lane++) result = result || *static_cast<bool*>(payloads[lane]);
    for (int lane = 0; lane < kWave; lane++) *static_cast<bool*>(payloads[lane]) = result;
  };
  host::meet_wave("wave_any", 0, any, &predicate);
  return predicate;
}

DEVICE int wave_uniform(int x) {
  const auto same = [](void* const* payloads) {
    const int first = *static_cast<const int*>(payloads[0]);
    for (int lane = 1; lane < kWave; lane++) {
      const int other = *static_cast<const int*>(payloads[lane]);
      if (other != first) host::fail("wave_uniform of %d in lane 0 and %d in lane %d", first, other, lane);
    }
  };
  host::meet_wave("wave_uniform", 0, same, &x);
  return x;
}

DEVICE float exp2(float x) { return ::exp2f(x); }
DEVICE float log2(float x) { return ::log2f(x); }

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(float16 x) {
  const unsigned sign = (x.bits & 0x8000u) << 16;
  const unsigned magnitude = (x.bits & 0x7fffu) << 13;
  // The exponent is rebased by a product, which handles subnormal numbers too; infinity and NaN
  // keep the largest exponent.
  const unsigned rebased = bits_of(float_of(magnitude) * 0x1p112f);
  return float_of(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : rebased));
}
DEVICE float to_float(bfloat16 x) { return float_of(static_cast<unsigned>(x.bits) << 16); }

// Conversions round to nearest, ties to even.
template <class T>
DEVICE T from_float(float x);
template <>
DEVICE float from_float<float>(float x) {
  return x;
}
template <>
DEVICE float16 from_float<float16>(float x) {
  const unsigned bits = bits_of(x);
  const unsigned sign = bits >> 16 & 0x8000u;
  const unsigned magnitude = bits & 0x7fffffffu;
  unsigned half;
  if (magnitude > 0x7f800000u) {
    half = 0x7fffu;
  } else if (magnitude >= 0x47800000u) {  // 2^16
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // 2^-14
    // Added to 1/2, it is rounded to the subnormal's bits, which come last.
    half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return {static_cast<unsigned short>(sign | half)};
}
template <>
DEVICE bfloat16 from_float<bfloat16>(float x) {
  const unsigned bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fffu};
  return {static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <int kBytes>
DEVICE void copy_async(void* shared, const void* global, bool valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "the sizes that cp.async has");
  host::copy_later(shared, global, kBytes, valid);
}
DEVICE void copy_async_commit() { host::commit_copies(); }
DEVICE void copy_async_wait() { host::perform_copies(); }

// Blocks run one after the other.
template <int kCount>
DEVICE void atomic_add(float* address, const float (&x)[kCount]) {
  if (reinterpret_cast<unsigned long long>(address) % sizeof(x) != 0)
    host::fail("%d floats are added to %p", kCount, static_cast<void*>(address));
  for (int i = 0; i < kCount; i++) address[i] += x[i];
}

DEVICE unsigned fetch_add(unsigned* counter, unsigned x) {
  const unsigned was = *counter;
  *counter += x;
  return was;
}

DEVICE void breakpoint() { host::fail("comes to a breakpoint"); }
DEVICE unsigned shared_address(const void* pointer) { return host::shared_address(pointer); }

// Where the elements of fragments lie, for the kernel: the row and the column of element `e` of a
// lane. Operands are told apart by their element's size.
template <int kItemsize>
struct Operands;
#if RAWATTN_WAVE == 32

// lane l holds rows l/4 and l/4 + 8, and in each 8-column half the columns 2*(l%4) and 2*(l%4) + 1
struct Accumulator {
  static constexpr int kElements = 8;
  static constexpr int kSlots = 2;
  float x[kElements];

  static constexpr int kRun = kElements / kSlots;

  DEVICE static constexpr int slot(int e) { return e / 2 % 2; }
  DEVICE static constexpr int element(int slot, int i) { return i % 2 + 2 * slot + i / 2 * 4; }
  DEVICE static constexpr int place(int column) { return column / 2 % 4 * kRun + column % 2 + column / 8 * 2; }
  DEVICE static int row(int lane, int slot) { return lane / 4 + 8 * slot; }
  DEVICE static int column(int lane, int e) { return lane % 4 * 2 + e % 2 + e / 4 * 8; }

  DEVICE static float row_max(float x) {
    x = fmaxf(x, shuffle_xor(x, 1));
    return fmaxf(x, shuffle_xor(x, 2));
  }
  DEVICE static float row_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
  }
};

template <>
struct Operands<2> {
  static constexpr int kDepth = 16;
  static constexpr int kElementsA = 8;
  static constexpr int kElementsB = 8;
  static int a_row(int lane, int e) { return lane / 4 + e / 2 % 2 * 8; }
  static int a_depth(int lane, int e) { return lane % 4 * 2 + e % 2 + e / 4 * 8; }
  static int b_depth(int lane, int e) { return lane % 4 * 2 + e % 2 + e / 2 % 2 * 8; }
  static int b_column(int lane, int e) { return lane / 4 + e / 4 * 8; }
};
// Every lane reads the operands of all its outputs: two rows, four columns.
template <>
struct Operands<4> {
  static constexpr int kDepth = 4;
  static constexpr int kElementsA = 8;
  static constexpr int kElementsB = 16;
  static int a_row(int lane, int e) { return lane / 4 + e / 4 * 8; }
  static int a_depth(int, int e) { return e % 4; }
  static int b_depth(int, int e) { return e % 4; }
  static int b_column(int lane, int e) { return lane % 4 * 2 + e / 4 % 2 + e / 8 * 8; }
};

#else

// lane l holds column l%16 and the four rows from 4*(l/16)
struct Accumulator {
  static constexpr int kElements = 4;
  static constexpr int kSlots = 4;
  float x[kElements];

  static constexpr int kRun = kElements / kSlots;

  DEVICE static constexpr int slot(int e) { return e; }
  DEVICE static constexpr int element(int slot, int) { return slot; }
  DEVICE static constexpr int place(int column) { return column; }
  DEVICE static int row(int lane, int slot) { return lane / 16 * 4 + slot; }
  DEVICE static int column(int lane, int) { return lane % 16; }

  DEVICE static float row_max(float x) {
    for (int mask = 1; mask < 16; mask *= 2) x = fmaxf(x, shuffle_xor(x, mask));
    return x;
  }
  DEVICE static float row_sum(float x) {
    for (int mask = 1; mask < 16; mask *= 2) x += shuffle_xor(x, mask);
    return x;
  }
};

template <>
struct Operands<2> {
  static constexpr int kDepth = 16;
  static constexpr int kElementsA = 4;
  static constexpr int kElementsB = 4;
  static int a_row(int lane, int) { return lane % 16; }
  static int a_depth(int lane, int e) { return lane / 16 * 4 + e; }
  static int b_depth(int lane, int e) { return lane / 16 * 4 + e; }
  static int b_column(int lane, int) { return lane % 16; }
};
template <>
struct Operands<4> {
  static constexpr int kDepth = 4;
  static constexpr int kElementsA = 1;
  static constexpr int kElementsB = 1;
  static int a_row(int lane, int) { return lane % 16; }
  static int a_depth(int lane, int) { return lane / 16; }
  static int b_depth(int lane, int) { return lane / 16; }
  static int b_column(int lane, int) { return lane % 16; }
};

#endif

// Where the product believes they lie: what each bit of the lane, then of the element, adds to the
// row and to the column. Written down apart from the maps above, so that a wrong map gives a wrong
// product instead of agreeing with itself.
struct Step {
  int row, column;
};
struct Layout {
  Step lane[6];
  Step element[4];

  constexpr int at(int lane_index, int element_index) const {
    int row = 0, column = 0;
    for (int bit = 0; bit < 6; bit++) {
      row += (lane_index >> bit & 1) * lane[bit].row;
      column += (lane_index >> bit & 1) * lane[bit].column;
    }
    for (int bit = 0; bit < 4; bit++) {
      row += (element_index >> bit & 1) * element[bit].row;
      column += (element_index >> bit & 1) * element[bit].column;
    }
    return 16 * row + column;
  }
};
template <int kElements>
struct Positions {
  unsigned char at[kWave][kElements];

  constexpr explicit Positions(const Layout& layout) : at() {
    for (int lane = 0; lane < kWave; lane++) {
      for (int e = 0; e < kElements; e++) at[lane][e] = static_cast<unsigned char>(layout.at(lane, e));
    }
  }
};
template <int kItemsize>
struct Layouts;
#if RAWATTN_WAVE == 32
constexpr Layout kLayoutC = {{{0, 2}, {0, 4}, {1, 0}, {2, 0}, {4, 0}}, {{0, 1}, {8, 0}, {0, 8}}};
template <>
struct Layouts<2> {
  static constexpr Layout kA = {{{0, 2}, {0, 4}, {1, 0}, {2, 0}, {4, 0}}, {{0, 1}, {8, 0}, {0, 8}}};
  static constexpr Layout kB = {{{2, 0}, {4, 0}, {0, 1}, {0, 2}, {0, 4}}, {{1, 0}, {8, 0}, {0, 8}}};
};
template <>
struct Layouts<4> {
  static constexpr Layout kA = {{{0, 0}, {0, 0}, {1, 0}, {2, 0}, {4, 0}}, {{0, 1}, {0, 2}, {8, 0}}};
  static constexpr Layout kB = {{{0, 2}, {0, 4}, {0, 0}, {0, 0}, {0, 0}}, {{1, 0}, {2, 0}, {0, 1}, {0, 8}}};
};
#else
constexpr Layout kLayoutC = {{{0, 1}, {0, 2}, {0, 4}, {0, 8}, {4, 0}, {8, 0}}, {{1, 0}, {2, 0}}};
template <>
struct Layouts<2> {
  static constexpr Layout kA = {{{1, 0}, {2, 0}, {4, 0}, {8, 0}, {0, 4}, {0, 8}}, {{0, 1}, {0, 2}}};
  static constexpr Layout kB = {{{0, 1}, {0, 2}, {0, 4}, {0, 8}, {4, 0}, {8, 0}}, {{1, 0}, {2, 0}}};
};
template <>
struct Layouts<4> {
  static constexpr Layout kA = {{{1, 0}, {2, 0}, {4, 0}, {8, 0}, {0, 1}, {0, 2}}, {}};
  static constexpr Layout kB = {{{0, 1}, {0, 2}, {0, 4}, {0, 8}, {1, 0}, {2, 0}}, {}};
};
#endif

template <class T>
struct Mma {
  using Map = Operands<sizeof(T)>;
  static constexpr int kDepth = Map::kDepth;
  static constexpr bool kAccumulatorFeedsA = kWave == 32 && sizeof(T) == 2;
  using C = Accumulator;
  struct A {
    T x[Map::kElementsA];
  };
  struct B {
    T x[Map::kElementsB];
  };

  // A[m][k] = tile[m * pitch + k]
  DEVICE static A load_a(const T* tile, int pitch, int lane) {
    check_alignment(tile, pitch);
    A a;
    for (int e = 0; e < Map::kElementsA; e++) {
      a.x[e] = tile[Map::a_row(lane, e) * pitch + Map::a_depth(lane, e)];
    }
    return a;
  }
  // A[m][k] = tile[k * pitch + m]
  DEVICE static A load_a_columns(const T* tile, int pitch, int lane) {
    check_alignment(tile, pitch);
    A a;
    for (int e = 0; e < Map::kElementsA; e++) {
      a.x[e] = tile[Map::a_depth(lane, e) * pitch + Map::a_row(lane, e)];
    }
    return a;
  }
  // tile[m * pitch + k] = A[m][k]
  DEVICE static void store_a(const A& a, T* tile, int pitch, int lane) {
    check_alignment(tile, pitch);
    for (int e = 0; e < Map::kElementsA; e++) {
      tile[Map::a_row(lane, e) * pitch + Map::a_depth(lane, e)] = a.x[e];
    }
  }
  // B[k][n] = tile[n * pitch + k]
  DEVICE static B load_b_rows(const T* tile, int pitch, int lane) {
    check_alignment(tile, pitch);
    B b;
    for (int e = 0; e < Map::kElementsB; e++) {
      b.x[e] = tile[Map::b_column(lane, e) * pitch + Map::b_depth(lane, e)];
    }
    return b;
  }
  // B[k][n] = tile[k * pitch + n]
  DEVICE static B load_b_columns(const T* tile, int pitch, int lane) {
    check_alignment(tile, pitch);
    B b;
    for (int e = 0; e < Map::kElementsB; e++) {
      b.x[e] = tile[Map::b_depth(lane, e) * pitch + Map::b_column(lane, e)];
    }
    return b;
  }
  DEVICE static unsigned pack_pair(float low, float high) {
    static_assert(sizeof(T) == 2, "two fill a register");
    return from_float<T>(low).bits | static_cast<unsigned>(from_float<T>(high).bits) << 16;
  }
  // A 16 x 16 accumulator has, element by element, the layout of an A operand.
  DEVICE static A from_accumulator(const C& c) {
    static_assert(kAccumulatorFeedsA, "the layouts differ");
    A a;
    for (int e = 0; e < Map::kElementsA; e++) a.x[e] = from_float<T>(c.x[e]);
    return a;
  }
  DEVICE static C to_accumulator(const A& a) {
    static_assert(kAccumulatorFeedsA, "the layouts differ");
    C c;
    for (int e = 0; e < Map::kElementsA; e++) c.x[e] = to_float(a.x[e]);
    return c;
  }
  DEVICE static void multiply_add(C& c, const A& a, const B& b) {
    Payload mine{&a, &b, &c};
    host::meet_wave("multiply_add", kDepth, multiply, &mine);
  }

 private:
  struct Payload {
    const A* a;
    const B* b;
    C* c;
  };

  // Matrix loads of a GPU want 16-byte rows.
  static void check_alignment(const T* tile, int pitch) {
    if (reinterpret_cast<unsigned long long>(tile) % 16 != 0 || pitch * int(sizeof(T)) % 16 != 0) {
      host::fail("a fragment is loaded from rows of %d bytes at %p: not all on 16 bytes", pitch * int(sizeof(T)),
                 static_cast<const void*>(tile));
    }
  }

  static void multiply(void* const* payloads) {
    static constexpr Positions<Map::kElementsA> kPositionsA(Layouts<sizeof(T)>::kA);
    static constexpr Positions<Map::kElementsB> kPositionsB(Layouts<sizeof(T)>::kB);
    static constexpr Positions<C::kElements> kPositionsC(kLayoutC);
    float a[256], b[256], c[256];
    for (int lane = 0; lane < kWave; lane++) {
      const Payload& p = *static_cast<const Payload*>(payloads[lane]);
      for (int e = 0; e < Map::kElementsA; e++) a[kPositionsA.at[lane][e]] = to_float(p.a->x[e]);
      for (int e = 0; e < Map::kElementsB; e++) b[kPositionsB.at[lane][e]] = to_float(p.b->x[e]);
      for (int e = 0; e < C::kElements; e++) c[kPositionsC.at[lane][e]] = p.c->x[e];
    }
    host::multiply_add(c, a, b, kDepth);
    for (int lane = 0; lane < kWave; lane++) {
      const Payload& p = *static_cast<const Payload*>(payloads[lane]);
      for (int e = 0; e < C::kElements; e++) p.c->x[e] = c[kPositionsC.at[lane][e]];
    }
  }
};

}  // namespace target
