// What a wave computes element by element, without matrix products: results that are NaN, where that may come of keys
// that their rows do not see.
//
// In a tile of scores a hidden key has a probability of 0, and a matrix product multiplies that by the key's value. A
// NaN or an infinity there makes NaN of rows that do not see the key. So kernels look for NaN in their results
// (has_hidden_nan), and have computed again what has some, by what reads nothing of a hidden key (attn/row_alone.cuh).
//
// All lanes leave loops together, by votes. Where the compiler does not know that they do, it spills registers of a
// kernel's own loops.
#pragma once

#include "attn/dropout.cuh"
#include "attn/mask_bits.cuh"
#include "attn/params.cuh"
#include "attn/score_rule.cuh"
#include "attn/visible.cuh"
#include "target/target.cuh"
#include "tile/nan.cuh"

// Whether a tile may have keys that some of its rows see and others do not.
constexpr bool kHidesFromSome =
    config::kLeft || config::kRight || config::kBlockMask || config::kBias > 0 || config::kScoreMod;

// Whether the output of a wave's tile, in its accumulators, may have a NaN of a hidden value. Such a NaN is in a column
// of all rows of the tile, so the lane's first row tells. With a bias it may be in any row: a bias of -inf does not
// hide a score that is NaN.
template <class C, int kRowBlocks, int kColumnBlocks>
DEVICE bool has_hidden_nan(const C (&x)[kRowBlocks][kColumnBlocks]) {
  if constexpr (!kHidesFromSome) return false;
  constexpr bool kAnyRow = config::kBias > 0;
  constexpr int kStep = C::kRun % 2 == 0 ? 2 : 1;
  NanSum<config::Element> sum;
  UNROLL for (int m = 0; m < (kAnyRow ? kRowBlocks : 1); m++) {
    UNROLL for (int slot = 0; slot < (kAnyRow ? C::kSlots : 1); slot++) {
      UNROLL for (int d = 0; d < kColumnBlocks; d++) {
        UNROLL for (int i = 0; i < C::kRun; i += kStep) {
          const auto& own = x[m][d].x;
          sum.add(d * C::kRun / 2 + i / 2, own[C::element(slot, i)], own[C::element(slot, i + kStep - 1)]);
        }
      }
    }
  }
  return sum.any();
}

// The scores of a query head of a sequence.
struct ScoresAlone {
  VisibleKeys<config::kLeft, config::kRight, config::kTopLeft, config::kPositions> visible;
  ScoreRule rule;
  DropoutRule dropout;

  DEVICE ScoresAlone(const ForwardParams& p, int sequence, int head, int len_q, int len_k)
      : visible(p, sequence, len_q, len_k),
        rule(p, sequence, head, len_q, len_k, visible.offset),
        dropout(p, sequence, head) {}

  // Whether query i sees key j by the limits of visible keys and by a BlockMask.
  DEVICE bool sees(int i, int j) const {
    const RowLimits limits = visible.row(i);
    bool sees = j <= limits.right && (j >= limits.left || j < visible.sink);
    if constexpr (config::kBlockMask) {
      sees = sees && MaskBits(rule.p.block_mask, rule.sequence, rule.head).shows(i, j);
    }
    return sees;
  }
  // The product of a query and a key, scaled and soft-capped.
  template <class Key>
  DEVICE float capped(const config::Element* query, const Key* key) const {
    return rule.capped(dot<config::kHeadDim>(query, key) * rule.scale());
  }
  // The score of query i and key j, of what capped() returned. -inf where a bias of -inf hides the key, whatever the
  // product is.
  DEVICE float score(float capped, int i, int j) const {
    float s = rule.modified(capped, i, j, 0, 0);
    if constexpr (ScoreRule::kLine) s += rule.added(i, j);
    if constexpr (config::kBias > 0) {
      const Bias& b = rule.p.bias;
      const int64 row = rule.sequence * b.batch + rule.head / b.group * b.head + (i < b.rows ? i : b.rows - 1) * b.row;
      const float bias =
          target::to_float(static_cast<const BiasElement*>(b.data)[row + (j < b.keys ? j : b.keys - 1) * b.key]);
      if (bias == -target::infinity()) return bias;
      s += bias;
    }
    if constexpr (config::kAlibi) s = fmaf(-rule.slope, fabsf(static_cast<float>(i + rule.offset - j)), s);
    return s;
  }

  template <int kColumns, class A, class B>
  DEVICE static float dot(const A* a, const B* b) {
    float sum = 0.0f;
#pragma unroll 1
    for (int d = 0; d < kColumns; d++) sum = fmaf(target::to_float(a[d]), target::to_float(b[d]), sum);
    return sum;
  }
};

// The columns of one row of a result, of which a wave computes those again that are NaN. A lane has every kWave-th.
template <int kColumns>
struct NanColumns {
  static constexpr int kEach = (kColumns + target::kWave - 1) / target::kWave;

  bool nan[kEach];
  float sum[kEach];

  // read(column): what the row has.
  template <class Read>
  DEVICE NanColumns(const Read& read, int lane) {
    UNROLL for (int n = 0; n < kEach; n++) {
      const int column = n * target::kWave + lane;
      const float x = column < kColumns ? read(column) : 0.0f;
      nan[n] = x != x;
      sum[n] = 0.0f;
    }
  }
  // Whether the lane has a column that has not become NaN again.
  DEVICE bool open() const {
    bool open = false;
    UNROLL for (int n = 0; n < kEach; n++) open = open || (nan[n] && sum[n] == sum[n]);
    return open;
  }
  // Adds rows, each times the weight of a lane, where `real` is true of the lane. address(n): where the row of lane n
  // is; the first `count` lanes may have one.
  template <class Address>
  DEVICE void add(float weight, bool real, int count, const Address& address, int lane) {
#pragma unroll 1
    for (int n = 0; n < target::kWave && n < count; n++) {
      const float own = target::float_of(target::shuffle(target::bits_of(weight), n));
      if (!target::wave_any(lane == n && real)) continue;
      const auto* const row = address(n);
      UNROLL for (int c = 0; c < kEach; c++) {
        const int column = c * target::kWave + lane;
        if (column < kColumns) sum[c] = fmaf(own, target::to_float(row[column]), sum[c]);
      }
    }
  }
  DEVICE void multiply(float factor) { UNROLL for (int n = 0; n < kEach; n++) sum[n] *= factor; }
  // write(column, x): replaces a column that was NaN.
  template <class Write>
  DEVICE void store(const Write& write, int lane) const {
    UNROLL for (int n = 0; n < kEach; n++) {
      if (nan[n]) write(n * target::kWave + lane, sum[n]);
    }
  }
};
