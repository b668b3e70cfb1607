// dk and dv where several blocks of the backward shared a key tile: adds up their parts (portable/gradient_part.cuh),
// always in the same order. A wave takes one physical row of keys. Several waves share a long row. Rows
// of no sequence are not touched. A NaN is noted for portable/backward_finish.cu. kSplitSinks: only the first
// p.sink_rows rows of each sequence have parts.
#include "attn/params.cuh"
#include "attn/physical_row.cuh"
#include "attn/rows.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"
#include "tile/nan.cuh"

namespace backward_parts {

using namespace config;
using C = target::Mma<Element>::C;

constexpr int kWaves = kThreads / target::kWave;
constexpr int kChunk = kCopyBytes / int(sizeof(Element));

// Adds up one row of a gradient, which has kColumns columns for each head. sums: the row in the first part; that of the
// next part is `apart` floats further on. first: the lane's first piece of the row. Lanes of all waves that share the
// row take its pieces in turn.
template <int kColumns>
DEVICE void add_up(Element* gradient, int64 head_stride, const float* sums, int64 apart, const BackwardParams& p,
                   int first, NanSum<Element>& nan) {
  constexpr int kChunks = kColumns / kChunk;
  for (int i = first; i < p.forward.nheads_kv * kChunks; i += target::kWave << p.key_row_shift) {
    const int head = i / kChunks;
    const int column = i % kChunks * kChunk;
    float x[kChunk] = {};
    for (int part = 0; part < p.parts; part++) {
      const float* const own = sums + part * apart + int64(head) * kDepth;
      UNROLL for (int j = 0; j < kChunk; j++) x[j] += own[(column + j) / 16 * 16 + C::position((column + j) % 16)];
    }
    Chunk<kCopyBytes> chunk;
    UNROLL for (int j = 0; j < kChunk; j++) {
      reinterpret_cast<Element*>(&chunk)[j] = target::from_float<Element>(x[j]);
    }
    *reinterpret_cast<Chunk<kCopyBytes>*>(gradient + head * head_stride + column) = chunk;
    nan.add_stored(chunk);
  }
}

// A row of keys: where it is in its array (batch, row), its number in each part (row_in_part), and how many rows a part
// has (rows_per_part).
struct PartRow {
  bool exists;
  int64 batch, row, row_in_part, rows_per_part;
};
DEVICE PartRow part_row(const BackwardParams& p, int64 index) {
  const ForwardParams& f = p.forward;
  if constexpr (kSplitSinks) {
    const int64 sequence = index / p.sink_rows;
    if (sequence >= f.batch) return {false, 0, 0, 0, 0};
    const Span keys = span_of(f.k_side, static_cast<int>(sequence));
    const int64 at = index - sequence * p.sink_rows;
    const bool packed = f.k_side.start.data != nullptr;
    return {at < keys.length, packed ? 0 : sequence, keys.start + at, index, f.batch * int64(p.sink_rows)};
  } else {
    const PhysicalRow own = physical_row<true>(f.k_side, f.batch, index);
    // Packed sequences share the rows of one array.
    const int64 rows_per_part = (f.k_side.start.data == nullptr ? f.batch : 1) * f.k_side.rows;
    return {own.logical, own.batch, own.row, own.batch * f.k_side.rows + own.row, rows_per_part};
  }
}

}  // namespace backward_parts

KERNEL LAUNCH_BOUNDS(config::kThreads, 1) void rawattn_backward_parts(PARAMETER BackwardParams p) {
  using namespace backward_parts;
  const ForwardParams& f = p.forward;
  const int wave = target::thread_index() / target::kWave;
  const int lane = target::thread_index() % target::kWave;
  const int64 index = int64(target::block_index()) * kWaves + wave;
  const int shares = 1 << p.key_row_shift, share = static_cast<int>(index & (shares - 1));
  const PartRow own = part_row(p, index >> p.key_row_shift);
  if (!own.exists) return;

  const int64 columns = int64(f.nheads_kv) * kDepth;
  const float* const dv = p.part_sums + own.row_in_part * columns;
  const float* const dk = dv + p.parts * own.rows_per_part * columns;
  const int first = share * target::kWave + lane;
  NanSum<Element> nan;
  add_up<kHeadDim>(row_at<Element>(p.dk, p.dk_strides, own.batch, own.row), p.dk_strides.head, dk,
                   own.rows_per_part * columns, p, first, nan);
  add_up<kHeadDimV>(row_at<Element>(p.dv, p.dv_strides, own.batch, own.row), p.dv_strides.head, dv,
                    own.rows_per_part * columns, p, first, nan);
  if (nan.any() && p.found_nan != nullptr) *p.found_nan = 1;
}
