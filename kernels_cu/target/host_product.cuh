// The matrix product of the simulated GPU (target/host.cuh): its fragments, and where their elements lie.
#pragma once

#include "target/host.cuh"

namespace target {

// Where the elements of operands lie as kernels see it: the row and the column of element `e` of a lane. kItemsize:
// bytes of an element.
template <int kItemsize>
struct Operands;
#if RAWATTN_WAVE == 32

// lane l holds rows l/4 and l/4 + 8, and in each 8-column half the columns 2*(l%4) and 2*(l%4) + 1
struct Accumulator {
  static constexpr int kRows = 16;
  static constexpr int kElements = 8;
  static constexpr int kSlots = 2;
  float x[kElements];

  static constexpr int kRun = kElements / kSlots;

  DEVICE static constexpr int slot(int e) { return e / 2 % 2; }
  DEVICE static constexpr int element(int slot, int i) { return i % 2 + 2 * slot + i / 2 * 4; }
  DEVICE static constexpr int position(int column) { return column / 2 % 4 * kRun + column % 2 + column / 8 * 2; }
  DEVICE static int row(int lane, int slot) { return lane / 4 + 8 * slot; }
  DEVICE static constexpr int column(int lane, int e) { return lane % 4 * 2 + e % 2 + e / 4 * 8; }

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
  static constexpr int kRows = 16;
  static constexpr int kElements = 4;
  static constexpr int kSlots = 4;
  float x[kElements];

  static constexpr int kRun = kElements / kSlots;

  DEVICE static constexpr int slot(int e) { return e; }
  DEVICE static constexpr int element(int slot, int) { return slot; }
  DEVICE static constexpr int position(int column) { return column; }
  DEVICE static int row(int lane, int slot) { return lane / 16 * 4 + slot; }
  DEVICE static constexpr int column(int lane, int) { return lane % 16; }

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

// Where the elements lie as the product sees it: what each bit of the lane's index, then of the element's, adds to the
// row and to the column. This is written down apart from the maps above, so that a wrong map gives a wrong product
// instead of agreeing with itself.
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
  // The same for tiles of any layout: run(row, column) is the address of 8 neighbouring elements of a row, from a
  // column on.
  template <class Run>
  DEVICE static B load_b_rows_of(const Run& run, int lane) {
    B b;
    for (int e = 0; e < Map::kElementsB; e++) {
      b.x[e] = element(run, Map::b_column(lane, e), Map::b_depth(lane, e));
    }
    return b;
  }
  template <class Run>
  DEVICE static B load_b_columns_of(const Run& run, int lane) {
    B b;
    for (int e = 0; e < Map::kElementsB; e++) {
      b.x[e] = element(run, Map::b_depth(lane, e), Map::b_column(lane, e));
    }
    return b;
  }
  template <class Run>
  DEVICE static T element(const Run& run, int row, int column) {
    const T* const first = run(row, column / 8 * 8);
    check_alignment(first, 8);
    return first[column % 8];
  }
  // The i-th pair of a lane's elements.
  DEVICE static unsigned pair(const B& b, int i) {
    return b.x[2 * i].bits | static_cast<unsigned>(b.x[2 * i + 1].bits) << 16;
  }
  // B operands of float8 tiles: run(row, column) is the address of the neighbouring elements that a fragment reads of a
  // row.
  template <class Run>
  DEVICE static B load_b_rows_float8(const Run& run, int lane) {
    B b;
    for (int e = 0; e < Map::kElementsB; e++) {
      b.x[e] = element_of_float8(run, Map::b_column(lane, e), depth_of_float8(Map::b_depth(lane, e)));
    }
    return b;
  }
  template <class Run>
  DEVICE static B load_b_columns_float8(const Run& run, int lane) {
    B b;
    for (int e = 0; e < Map::kElementsB; e++) {
      const int column = Map::b_column(lane, e);
      b.x[e] = element_of_float8(run, Map::b_depth(lane, e), column % 8 * 2 + column / 8);
    }
    return b;
  }
  DEVICE static A load_a_float8(const T* tile, int pitch, int lane) {
    check_alignment(tile, pitch);
    A a;
    for (int e = 0; e < Map::kElementsA; e++) {
      a.x[e] = tile[Map::a_row(lane, e) * pitch + depth_of_float8(Map::a_depth(lane, e))];
    }
    return a;
  }
  DEVICE static unsigned to_pair(float low, float high) {
    static_assert(sizeof(T) == 2, "two fill a register");
    return from_float<T>(low).bits | static_cast<unsigned>(from_float<T>(high).bits) << 16;
  }
  // zeros + 0 * pair: NaN where the pair has a NaN or an infinity.
  DEVICE static unsigned fold_nan(unsigned pair, unsigned zeros) {
    const auto half = [](unsigned x, int n) { return to_float(T{static_cast<unsigned short>(x >> 16 * n)}); };
    return to_pair(half(zeros, 0) + 0.0f * half(pair, 0), half(zeros, 1) + 0.0f * half(pair, 1));
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
  // Keeps an A operand in the first registers of an accumulator whose values are no longer needed; stashed_operand()
  // returns it. The accumulator's other registers are lost, so they become NaN.
  DEVICE static void stash_operand(C& c, const A& a) {
    static_assert(kAccumulatorFeedsA && sizeof(A) <= sizeof(C), "an operand has room");
    for (int e = 0; e < C::kElements; e++) c.x[e] = float_of(0x7fc00000);
    __builtin_memcpy(c.x, a.x, sizeof(a.x));
  }
  DEVICE static A stashed_operand(const C& c) {
    A a;
    __builtin_memcpy(a.x, c.x, sizeof(a.x));
    return a;
  }
  DEVICE static void multiply_add(C& c, const A& a, const B& b) {
    Payload mine{&a, &b, &c};
    host::meet_wave("multiply_add", kDepth, multiply, &mine);
  }

 private:
  // The order of the depth in float8 fragments of an Ampere GPU: see load_b_rows_float8() in cuda_product.cuh.
  static int depth_of_float8(int depth) { return kDepth == 16 ? depth % 8 / 2 * 4 + depth / 8 * 2 + depth % 2 : depth; }
  template <class Run>
  static T element_of_float8(const Run& run, int row, int column) {
    const float8* const first = run(row, 0);
    if (reinterpret_cast<unsigned long long>(first) % kDepth != 0) {
      host::fail("a fragment is loaded from a row at %p: not on %d bytes", static_cast<const void*>(first), kDepth);
    }
    return from_float<T>(to_float(first[column]));
  }

  struct Payload {
    const A* a;
    const B* b;
    C* c;
  };

  // A GPU's matrix loads (ldmatrix) need rows that begin at multiples of 16 bytes.
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
