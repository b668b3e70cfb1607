// The product of target/eight_rows.cuh on NVIDIA GPUs. mma.sync has 16 rows and 8 columns, so it computes the
// transposed product: C^T = B^T A^T. A fragment of its A has the elements of a fragment B of Mma, with the two
// registers in the middle exchanged.
#pragma once

#include "target/cuda_product.cuh"

namespace target {

// Lane l holds rows 2*(l%4) and 2*(l%4) + 1 of the 8, and columns l/4 and l/4 + 8. Element e = 2*half + slot.
struct EightRowsAccumulator {
  static constexpr int kRows = 8;
  static constexpr int kElements = 4;
  static constexpr int kSlots = 2;
  float x[kElements];

  static constexpr int kRun = kElements / kSlots;

  DEVICE static constexpr int slot(int e) { return e & 1; }
  DEVICE static constexpr int element(int slot, int i) { return slot + 2 * i; }
  DEVICE static int row(int lane, int slot) { return 2 * (lane % 4) + slot; }
  DEVICE static constexpr int column(int lane, int e) { return lane / 4 + 8 * (e >> 1); }

  // Reductions over the eight lanes that share a row.
  DEVICE static float row_max(float x) {
    UNROLL for (int mask = 4; mask < 32; mask *= 2) x = fmaxf(x, shuffle_xor(x, mask));
    return x;
  }
  DEVICE static float row_sum(float x) {
    UNROLL for (int mask = 4; mask < 32; mask *= 2) x += shuffle_xor(x, mask);
    return x;
  }
};

struct EightRowsMma : Mma<float16> {
  using C = EightRowsAccumulator;
  struct A {
    unsigned r[2];
  };

  DEVICE static A load_a_float8(const float16* tile, int pitch, int lane) {
    const uint2 four = *reinterpret_cast<const uint2*>(tile + lane / 4 * pitch + lane % 4 * 4);
    return {{four.x, four.y}};
  }
  DEVICE static A from_accumulator(const C& c) {
    A a;
    UNROLL for (int half = 0; half < 2; half++) {
      const unsigned pair = to_pair(c.x[2 * half], c.x[2 * half + 1]);
      asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(a.r[half]) : "r"(pair));
    }
    return a;
  }
  DEVICE static void multiply_add(C& c, const A& a, const B& b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3])
        : "r"(b.r[0]), "r"(b.r[2]), "r"(b.r[1]), "r"(b.r[3]), "r"(a.r[0]), "r"(a.r[1]));
  }
};

}  // namespace target
