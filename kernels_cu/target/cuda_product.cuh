// The matrix product of NVIDIA GPUs from Ampere on. 16-bit types: mma.sync, with fragments that ldmatrix loads.
// float32: fused multiply-adds, not tensor cores.
#pragma once

#include "target/cuda.cuh"

namespace target {

// The accumulator of a 16 x 16 product, shared by every type: lane l holds rows l/4 and l/4 + 8, and in each of the two
// 8-column halves the columns 2*(l%4) and 2*(l%4) + 1. Element e = 4*half + 2*slot + parity.
struct Accumulator {
  static constexpr int kRows = 16;
  static constexpr int kElements = 8;
  static constexpr int kSlots = 2;  // distinct rows a lane holds
  float x[kElements];

  static constexpr int kRun = kElements / kSlots;  // elements of one row that a lane holds

  DEVICE static constexpr int slot(int e) { return (e >> 1) & 1; }
  DEVICE static constexpr int element(int slot, int i) {
    return (i & 1) + 2 * slot + 4 * (i >> 1);
  }  // the i-th element that a lane holds of a row
  // The position of a column if each lane of a row stores the elements it holds of that row side by side.
  DEVICE static constexpr int position(int column) { return column / 2 % 4 * kRun + column % 2 + column / 8 * 2; }
  DEVICE static int row(int lane, int slot) { return lane / 4 + 8 * slot; }
  DEVICE static constexpr int column(int lane, int e) { return 2 * (lane % 4) + (e & 1) + 8 * (e >> 2); }

  // Reductions over the four lanes that share a row.
  DEVICE static float row_max(float x) {
    x = fmaxf(x, shuffle_xor(x, 1));
    return fmaxf(x, shuffle_xor(x, 2));
  }
  DEVICE static float row_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
  }
};

template <class T>
struct Mma16Bit {
  static constexpr int kDepth = 16;
  static constexpr bool kAccumulatorFeedsA = true;
  using C = Accumulator;
  struct A {
    unsigned r[4];
  };
  struct B {
    unsigned r[4];
  };

  // A[m][k] = tile[m * pitch + k]
  DEVICE static A load_a(const T* tile, int pitch, int lane) {
    A a;
    ldmatrix(a.r, tile + (lane % 16) * pitch + (lane / 16) * 8);
    return a;
  }
  // A[m][k] = tile[k * pitch + m]
  DEVICE static A load_a_columns(const T* tile, int pitch, int lane) {
    A a;
    ldmatrix_transposed(a.r, tile + (lane % 8 + lane / 16 * 8) * pitch + (lane / 8 % 2) * 8);
    return a;
  }
  // tile[m * pitch + k] = A[m][k]
  DEVICE static void store_a(const A& a, T* tile, int pitch, int lane) {
#if __CUDA_ARCH__ >= 900
    stmatrix(tile + (lane % 16) * pitch + (lane / 16) * 8, a.r);
#else
    UNROLL for (int i = 0; i < 4; i++) {
      *reinterpret_cast<unsigned*>(tile + (lane / 4 + i % 2 * 8) * pitch + lane % 4 * 2 + i / 2 * 8) = a.r[i];
    }
#endif
  }
  // B[k][n] = tile[n * pitch + k]
  DEVICE static B load_b_rows(const T* tile, int pitch, int lane) {
    B b;
    ldmatrix(b.r, tile + (lane % 8 + lane / 16 * 8) * pitch + (lane / 8 % 2) * 8);
    return b;
  }
  // B[k][n] = tile[k * pitch + n]
  DEVICE static B load_b_columns(const T* tile, int pitch, int lane) {
    B b;
    ldmatrix_transposed(b.r, tile + (lane % 16) * pitch + (lane / 16) * 8);
    return b;
  }
  // The same for tiles of any layout: run(row, column) is the address of 8 neighbouring elements of a row, from a
  // column on.
  template <class Run>
  DEVICE static B load_b_rows_of(const Run& run, int lane) {
    B b;
    ldmatrix(b.r, run(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8));
    return b;
  }
  template <class Run>
  DEVICE static B load_b_columns_of(const Run& run, int lane) {
    B b;
    ldmatrix_transposed(b.r, run(lane % 16, lane / 16 * 8));
    return b;
  }
  // B operands of float8 tiles, converted on their way into registers. run(row, column): the address of 16 neighbouring
  // elements. A lane gets four neighbours of a row at once, so the depth comes in another order than in load_b_rows().
  // load_a_float8() loads A in the same order.
  template <class Run>
  DEVICE static B load_b_rows_float8(const Run& run, int lane) {
    unsigned r[2];
    ldmatrix(r, run(lane % 16, 0));
    B b;
    UNROLL for (int i = 0; i < 2; i++) {
      unsigned pairs[2];
      float16_pairs(pairs, r[i]);
      b.r[2 * i] = pairs[0];
      b.r[2 * i + 1] = pairs[1];
    }
    return b;
  }
  // A lane gets two neighbours of each of two rows. The even column goes to the first half of the block's columns, the
  // odd one to the second half: see column_of_float8().
  template <class Run>
  DEVICE static B load_b_columns_float8(const Run& run, int lane) {
    unsigned r[2];
    ldmatrix_transposed(r, run(lane % 16, 0));
    B b;
    UNROLL for (int i = 0; i < 2; i++) {
      unsigned pairs[2];
      float16_pairs(pairs, __byte_perm(r[i], 0, 0x3120));
      b.r[i] = pairs[0];
      b.r[2 + i] = pairs[1];
    }
    return b;
  }
  DEVICE static A load_a_float8(const T* tile, int pitch, int lane) {
    A a;
    UNROLL for (int i = 0; i < 2; i++) {
      const uint2 four = *reinterpret_cast<const uint2*>(tile + (lane / 4 + i * 8) * pitch + lane % 4 * 4);
      a.r[i] = four.x;
      a.r[2 + i] = four.y;
    }
    return a;
  }
  DEVICE static unsigned to_pair(float low, float high);
  // zeros + 0 * pair: NaN where the pair has a NaN or an infinity.
  DEVICE static unsigned fold_nan(unsigned pair, unsigned zeros);
  // The i-th pair of a lane's elements.
  DEVICE static unsigned pair(const B& b, int i) { return b.r[i]; }
  // A 16 x 16 accumulator has, element by element, the layout of an A operand.
  DEVICE static A from_accumulator(const C& c) {
    A a;
    UNROLL for (int i = 0; i < 4; i++) a.r[i] = to_pair(c.x[2 * i], c.x[2 * i + 1]);
    return a;
  }
  DEVICE static C to_accumulator(const A& a) {
    C c;
    UNROLL for (int i = 0; i < 4; i++) {
      c.x[2 * i] = to_float(T{static_cast<unsigned short>(a.r[i])});
      c.x[2 * i + 1] = to_float(T{static_cast<unsigned short>(a.r[i] >> 16)});
    }
    return c;
  }
  // Keeps an A operand in the first registers of an accumulator whose values are no longer needed; stashed_operand()
  // returns it.
  DEVICE static void stash_operand(C& c, const A& a) { UNROLL for (int i = 0; i < 4; i++) c.x[i] = float_of(a.r[i]); }
  DEVICE static A stashed_operand(const C& c) {
    A a;
    UNROLL for (int i = 0; i < 4; i++) a.r[i] = bits_of(c.x[i]);
    return a;
  }
  DEVICE static void multiply_add(C& c, const A& a, const B& b);
};

template <class T>
struct Mma;

#define RAWATTN_MMA_16BIT(T, name)                                                                              \
  template <>                                                                                                   \
  DEVICE unsigned Mma16Bit<T>::to_pair(float low, float high) {                                                 \
    unsigned pair;                                                                                              \
    asm("cvt.rn." name "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));                                \
    return pair;                                                                                                \
  }                                                                                                             \
  template <>                                                                                                   \
  DEVICE unsigned Mma16Bit<T>::fold_nan(unsigned pair, unsigned zeros) {                                        \
    asm("fma.rn." name "x2 %0, %1, %2, %0;" : "+r"(zeros) : "r"(pair), "r"(0));                                 \
    return zeros;                                                                                               \
  }                                                                                                             \
  template <>                                                                                                   \
  DEVICE void Mma16Bit<T>::multiply_add(C& c, const A& a, const B& b) {                                         \
    UNROLL for (int h = 0; h < 2; h++) {                                                                        \
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                       \
                   ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "                                                        \
                   "{%8,%9}, {%0,%1,%2,%3};"                                                                    \
                   : "+f"(c.x[4 * h]), "+f"(c.x[4 * h + 1]), "+f"(c.x[4 * h + 2]), "+f"(c.x[4 * h + 3])         \
                   : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[2 * h]), "r"(b.r[2 * h + 1])); \
    }                                                                                                           \
  }                                                                                                             \
  template <>                                                                                                   \
  struct Mma<T> : Mma16Bit<T> {};

RAWATTN_MMA_16BIT(float16, "f16")
RAWATTN_MMA_16BIT(bfloat16, "bf16")
#undef RAWATTN_MMA_16BIT

// float32 keeps float32 accuracy: fused multiply-adds, not TF32. A lane reads the operands of its own two rows and four
// columns.
template <>
struct Mma<float> {
  static constexpr int kDepth = 4;
  static constexpr bool kAccumulatorFeedsA = false;
  using C = Accumulator;
  struct A {
    float4 row[2];
  };
  struct B {
    float4 column[4];  // 2 * half + parity
  };

  DEVICE static A load_a(const float* tile, int pitch, int lane) {
    A a;
    UNROLL for (int slot = 0; slot < 2; slot++) {
      a.row[slot] = *reinterpret_cast<const float4*>(tile + C::row(lane, slot) * pitch);
    }
    return a;
  }
  DEVICE static A load_a_columns(const float* tile, int pitch, int lane) {
    A a;
    UNROLL for (int slot = 0; slot < 2; slot++) {
      const float* const column = tile + C::row(lane, slot);
      a.row[slot] = make_float4(column[0], column[pitch], column[2 * pitch], column[3 * pitch]);
    }
    return a;
  }
  DEVICE static B load_b_rows(const float* tile, int pitch, int lane) {
    B b;
    UNROLL for (int n = 0; n < 4; n++) {
      b.column[n] = *reinterpret_cast<const float4*>(tile + C::column(lane, (n >> 1) * 4 + (n & 1)) * pitch);
    }
    return b;
  }
  DEVICE static B load_b_columns(const float* tile, int pitch, int lane) {
    B b;
    UNROLL for (int half = 0; half < 2; half++) {
      float2 k[4];
      UNROLL for (int i = 0; i < 4; i++) {
        k[i] = *reinterpret_cast<const float2*>(tile + i * pitch + C::column(lane, half * 4));
      }
      b.column[2 * half] = make_float4(k[0].x, k[1].x, k[2].x, k[3].x);
      b.column[2 * half + 1] = make_float4(k[0].y, k[1].y, k[2].y, k[3].y);
    }
    return b;
  }
  // B operands of float8 tiles: run(row, column) is the address of neighbouring elements.
  template <class Run>
  DEVICE static B load_b_rows_float8(const Run& run, int lane) {
    B b;
    UNROLL for (int n = 0; n < 4; n++) b.column[n] = four_floats(run(C::column(lane, (n >> 1) * 4 + (n & 1)), 0));
    return b;
  }
  // A lane takes four neighbours of each row, as the columns that column_of_float8() says.
  template <class Run>
  DEVICE static B load_b_columns_float8(const Run& run, int lane) {
    float4 k[4];
    UNROLL for (int i = 0; i < 4; i++) k[i] = four_floats(run(i, lane % 4 * 4));
    B b;
    b.column[0] = make_float4(k[0].x, k[1].x, k[2].x, k[3].x);
    b.column[2] = make_float4(k[0].y, k[1].y, k[2].y, k[3].y);
    b.column[1] = make_float4(k[0].z, k[1].z, k[2].z, k[3].z);
    b.column[3] = make_float4(k[0].w, k[1].w, k[2].w, k[3].w);
    return b;
  }
  DEVICE static A load_a_float8(const float* tile, int pitch, int lane) { return load_a(tile, pitch, lane); }
  DEVICE static void multiply_add(C& c, const A& a, const B& b) {
    UNROLL for (int e = 0; e < C::kElements; e++) {
      const float4 x = a.row[C::slot(e)];
      const float4 y = b.column[2 * (e >> 2) + (e & 1)];
      c.x[e] = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, c.x[e]))));
    }
  }

 private:
  DEVICE static float4 four_floats(const float8* four) {
    const unsigned x = *reinterpret_cast<const unsigned*>(four);
    const auto one = [](unsigned byte) { return to_float(float8{static_cast<unsigned char>(byte)}); };
    return make_float4(one(x), one(x >> 8), one(x >> 16), one(x >> 24));
  }
};

}  // namespace target
