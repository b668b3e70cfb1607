// Merges partial results of attention over disjoint sets of keys into attention over all of them:
//
//   lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i
//
// One wave takes one row of kHeadsAtOnce heads, kLanes lanes each. The output of a partial result whose lse is -inf is
// not read.
#include "attn/helper_params.cuh"
#include "attn/rows.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"

namespace combine {

using namespace config;

template <int kKind>  // as in tile/typed.cuh
struct Number;
template <>
struct Number<0> {
  using Type = float;
};
template <>
struct Number<1> {
  using Type = float16;
};
template <>
struct Number<2> {
  using Type = bfloat16;
};
using Result = Number<kResult>::Type;

constexpr int kWaves = kThreads / target::kWave;
constexpr int kLoad = kLoadBytes / int(sizeof(Element));
constexpr int kStore = kStoreBytes / int(sizeof(Result));
constexpr int kChunk = kLoad > kStore ? kLoad : kStore;  // neighbouring elements of a row that a lane holds
constexpr int kChunks = kHeadDimV / kChunk;
static_assert(kHeadDimV % kChunk == 0, "an access must not straddle the end of a row");
constexpr int kLanes = power_of_two_from(kChunks) < target::kWave ? power_of_two_from(kChunks) : target::kWave;
constexpr int kHeadsAtOnce = target::kWave / kLanes;
constexpr int kPasses = (kChunks + kLanes - 1) / kLanes;
constexpr int kAtOnce = kChunk * kPasses <= 8 ? 4 : 2;  // partial results that are loaded at a time

template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Vector {
  T x[kCount];
};

DEVICE float maximum(float a, float b) { return a > b ? a : b; }  // b if a is NaN

// The address of partial result i: the array i where each has its own (`listed`; the stride is 0 then), else a part of
// one stacked array.
template <class T, class Array>
DEVICE const T* partial(Array* const (&arrays)[kMaxListed], bool listed, int64 stride, int i) {
  return static_cast<const T*>(arrays[listed ? i : 0]) + i * stride;
}

}  // namespace combine

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_combine(PARAMETER CombineParams p) {
  using namespace combine;
  const int lane = target::thread_index() % target::kWave;
  const int64 index = int64(target::block_index()) * kWaves + target::thread_index() / target::kWave;
  const int groups = (p.nheads + kHeadsAtOnce - 1) / kHeadsAtOnce;
  const int64 row_index = index / groups;
  const int64 batch = row_index / p.rows;
  if (batch >= p.batch) return;
  const int64 row = row_index - batch * p.rows;
  const int own_head = int(index - row_index * groups) * kHeadsAtOnce + lane / kLanes;
  // Lanes without a head of their own repeat the last one: all lanes must take part in the shuffles.
  const bool real = own_head < p.nheads;
  const int head = real ? own_head : p.nheads - 1;
  const int part = lane % kLanes;

  const int64 at = batch * p.lses_strides.batch + row * p.lses_strides.row + head * p.lses_strides.head;
  const auto log_of = [&](int i) { return partial<float>(p.lses, p.lses_listed, p.lses_partial, i)[at]; };
  float top = -target::infinity();
  for (int i = part; i < p.partials; i += kLanes) top = maximum(log_of(i), top);
  UNROLL for (int mask = 1; mask < kLanes; mask *= 2) top = maximum(target::shuffle_xor(top, mask), top);
  if (top == -target::infinity()) top = 0.0f;  // each lse is -inf or NaN; a NaN makes the sum NaN
  float sum = 0.0f;
  for (int i = part; i < p.partials; i += kLanes) sum += target::exp(log_of(i) - top);
  UNROLL for (int mask = 1; mask < kLanes; mask *= 2) sum += target::shuffle_xor(sum, mask);
  const float share = sum == 0.0f ? 0.0f : 1.0f / sum;

  const int64 out_at = batch * p.outs_strides.batch + row * p.outs_strides.row + head * p.outs_strides.head;
  float total[kPasses][kChunk] = {};
  for (int first = 0; first < p.partials; first += kAtOnce) {
    float weight[kAtOnce];
    Vector<Element, kLoad> vector[kAtOnce][kPasses][kChunk / kLoad];
    UNROLL for (int n = 0; n < kAtOnce; n++) {
      const int i = first + n;
      const float log = i < p.partials ? log_of(i) : -target::infinity();
      const bool alive = log != -target::infinity();
      weight[n] = alive ? target::exp(log - top) * share : 0.0f;
      const Element* from = alive ? partial<Element>(p.outs, p.outs_listed, p.outs_partial, i) + out_at : nullptr;
      UNROLL for (int pass = 0; pass < kPasses; pass++) {
        const int chunk = pass * kLanes + part;
        UNROLL for (int j = 0; j < kChunk / kLoad; j++) {
          const bool read = alive && (kChunks % kLanes == 0 || chunk < kChunks);
          vector[n][pass][j] = read ? reinterpret_cast<const Vector<Element, kLoad>*>(from + chunk * kChunk)[j]
                                    : Vector<Element, kLoad>{};
        }
      }
    }
    UNROLL for (int n = 0; n < kAtOnce; n++) {
      UNROLL for (int pass = 0; pass < kPasses; pass++) {
        UNROLL for (int j = 0; j < kChunk; j++) {
          total[pass][j] += weight[n] * target::to_float(vector[n][pass][j / kLoad].x[j % kLoad]);
        }
      }
    }
  }

  if (!real) return;
  Result* const to = row_at<Result>(p.out, p.out_strides, batch, row, head);
  UNROLL for (int pass = 0; pass < kPasses; pass++) {
    const int chunk = pass * kLanes + part;
    if (kChunks % kLanes != 0 && chunk >= kChunks) continue;
    UNROLL for (int j = 0; j < kChunk / kStore; j++) {
      Vector<Result, kStore> stored;
      UNROLL for (int e = 0; e < kStore; e++) { stored.x[e] = target::from_float<Result>(total[pass][j * kStore + e]); }
      reinterpret_cast<Vector<Result, kStore>*>(to + chunk * kChunk)[j] = stored;
    }
  }
  if (part == 0) p.lse[(batch * p.nheads + head) * p.rows + row] = top + target::log(sum);
}
