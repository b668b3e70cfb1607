// What dS needs of a query row of the backward, beside its lse:
//
//   row_delta = dlse - dout . out, 0 where lse is -inf
#pragma once

#include "attn/params.cuh"
#include "attn/rows.cuh"
#include "attn/sequence.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

namespace row_delta {

using config::Element;
constexpr int kChunk = config::kCopyBytes / int(sizeof(Element));
constexpr int kChunks = (config::kHeadDimV + kChunk - 1) / kChunk;
constexpr int kLanes = power_of_two_from(kChunks) < target::kWave ? power_of_two_from(kChunks) : target::kWave;
constexpr int kDots = target::kWave / kLanes;  // that a wave computes at once

struct alignas(config::kCopyBytes) Vector {
  Element x[kChunk];
};

// The dot product of two rows of a head, by kLanes lanes, all of which get it. lane: the lane among these.
DEVICE float dot(const Element* a, const Element* b, int lane) {
  float sum = 0.0f;
  UNROLL for (int base = 0; base < kChunks; base += kLanes) {
    // Lanes without a chunk repeat the last one, so that no branch keeps loads of several rows apart.
    const bool exists = kChunks % kLanes == 0 || base + lane < kChunks;
    const int chunk = exists ? base + lane : kChunks - 1;
    const Vector x = reinterpret_cast<const Vector*>(a)[chunk];
    const Vector y = reinterpret_cast<const Vector*>(b)[chunk];
    float part = 0.0f;
    UNROLL for (int i = 0; i < kChunk; i++) part += target::to_float(x.x[i]) * target::to_float(y.x[i]);
    if (exists) sum += part;
  }
  UNROLL for (int mask = 1; mask < kLanes; mask *= 2) sum += target::shuffle_xor(sum, mask);
  return sum;
}

// What the row_delta of a row takes beside dout . out.
struct Terms {
  float lse, dlse;

  // at: the row's index in arrays like lse.
  DEVICE Terms(const BackwardParams& p, int64 at)
      : lse(p.forward.lse[at]), dlse(p.dlse == nullptr ? 0.0f : p.dlse[at]) {}

  DEVICE float delta(float dot) const { return lse == -target::infinity() ? 0.0f : dlse - dot; }
};

// Computes row_delta of all queries of a sequence, for the query heads [head, head + heads). Called by all lanes of
// `waves` waves, of which this is number `wave`. found: gets them, `pitch` to a head, behind its rows 0.
DEVICE void compute(float* found, int pitch, const BackwardParams& p, int sequence, const Span& q, int head, int heads,
                    int wave, int waves, int lane) {
  // A wave computes kRows rows of a head together: their loads are all in flight, and each lane stores one at most.
  constexpr int kSteps = kLanes < 8 ? kLanes : 8, kRows = kSteps * kDots;
  const ForwardParams& f = p.forward;
  const int slot = lane / kLanes, part = lane % kLanes;
  const int pieces = (q.length + kRows - 1) / kRows;
#pragma unroll 1
  for (int piece = wave; piece < heads * pieces; piece += waves) {
    const int n = head + piece / pieces, first = piece % pieces * kRows;
    const auto out = rows_of<const Element>(f.out, f.out_strides, sequence, q, n);
    const auto dout = rows_of<const Element>(p.dout, p.dout_strides, sequence, q, n);
    // A lane's own row, if it has one.
    const int own_row = first + part * kDots + slot;
    const bool stores = part < kSteps && own_row < q.length;
    const int64 at = sequence * f.lse_batch + n * f.lse_head + q.start + (stores ? own_row : first);
    const Terms terms(p, at);  // in flight together with the rows
    float own = 0.0f;
    UNROLL for (int step = 0; step < kSteps; step++) {
      // Lanes without a row repeat the last one: all lanes must take part in the shuffles.
      const int row = first + step * kDots + slot, real = row < q.length ? row : q.length - 1;
      const float product = dot(dout.from(real).first, out.from(real).first, part);
      if (part == step) own = product;
    }
    if (stores) found[(n - head) * pitch + own_row] = terms.delta(own);
  }
  for (int n = 0; n < heads; n++) {
    for (int row = q.length + wave * target::kWave + lane; row < pitch; row += waves * target::kWave) {
      found[n * pitch + row] = 0.0f;
    }
  }
}

}  // namespace row_delta
