// The product of target/eight_rows.cuh on the simulated GPU.
#pragma once

#include "target/host_product.cuh"

namespace target {

// lane l holds rows 2*(l%4) and 2*(l%4) + 1 of the 8, and columns l/4 and l/4 + 8
struct EightRowsAccumulator {
  static constexpr int kRows = 8;
  static constexpr int kElements = 4;
  static constexpr int kSlots = 2;
  float x[kElements];

  static constexpr int kRun = kElements / kSlots;

  DEVICE static constexpr int slot(int e) { return e % 2; }
  DEVICE static constexpr int element(int slot, int i) { return slot + 2 * i; }
  DEVICE static int row(int lane, int slot) { return lane % 4 * 2 + slot; }
  DEVICE static constexpr int column(int lane, int e) { return lane / 4 + e / 2 * 8; }

  DEVICE static float row_max(float x) {
    for (int mask = 4; mask < 32; mask *= 2) x = fmaxf(x, shuffle_xor(x, mask));
    return x;
  }
  DEVICE static float row_sum(float x) {
    for (int mask = 4; mask < 32; mask *= 2) x += shuffle_xor(x, mask);
    return x;
  }
};

struct EightRowsMma : Mma<float16> {
  using C = EightRowsAccumulator;
  static constexpr int kElementsA = 4;
  struct A {
    float16 x[kElementsA];
  };

  DEVICE static A load_a_float8(const float16* tile, int pitch, int lane) {
    if (reinterpret_cast<unsigned long long>(tile) % 16 != 0 || pitch % 8 != 0) {
      host::fail("a fragment is loaded from rows of %d elements at %p: not all on 16 bytes", pitch,
                 static_cast<const void*>(tile));
    }
    A a;
    for (int e = 0; e < kElementsA; e++) a.x[e] = tile[lane / 4 * pitch + lane % 4 * 4 + e];
    return a;
  }
  DEVICE static A from_accumulator(const C& c) {
    const int lane = thread_index() % kWave, row = lane / 4;
    A a;
    for (int e = 0; e < kElementsA; e++) {
      const int column = lane % 4 * 2 + e % 2, holder = column * 4 + row / 2;
      const unsigned even = shuffle(bits_of(c.x[e / 2 * 2]), holder);
      const unsigned odd = shuffle(bits_of(c.x[e / 2 * 2 + 1]), holder);
      a.x[e] = from_float<float16>(float_of(row % 2 == 0 ? even : odd));
    }
    return a;
  }
  DEVICE static void multiply_add(C& c, const A& a, const B& b) {
    Payload mine{&a, &b, &c};
    host::meet_wave("multiply_add of eight rows", kDepth, multiply, &mine);
  }

 private:
  static constexpr Layout kLayoutA = {{{0, 2}, {0, 4}, {1, 0}, {2, 0}, {4, 0}}, {{0, 1}, {0, 8}}};
  static constexpr Layout kLayoutC = {{{2, 0}, {4, 0}, {0, 1}, {0, 2}, {0, 4}}, {{1, 0}, {0, 8}}};
  struct Payload {
    const A* a;
    const B* b;
    C* c;
  };

  static void multiply(void* const* payloads) {
    static constexpr Positions<kElementsA> kPositionsA(kLayoutA);
    static constexpr Positions<Map::kElementsB> kPositionsB(Layouts<2>::kB);
    static constexpr Positions<C::kElements> kPositionsC(kLayoutC);
    float a[256] = {}, b[256], c[256] = {};  // the last eight rows of a and c stay 0
    for (int lane = 0; lane < kWave; lane++) {
      const Payload& p = *static_cast<const Payload*>(payloads[lane]);
      for (int e = 0; e < kElementsA; e++) a[kPositionsA.at[lane][e]] = to_float(p.a->x[e]);
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
