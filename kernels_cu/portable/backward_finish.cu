// The last step of the backward.
//
// With kWithSums: dq = scale * dq_sum, in natural units (portable/gradient_unit.cuh), in the dtype and the layout of
// dq. A wave takes one physical row, all heads. Several waves share a row that is long.
//
// Where keys may be hidden from some rows of a tile (kHidesFromSome), it computes gradients again that have a NaN
// (portable/gradients_alone.cuh): a wave those of its row of dq as it goes; all others only if a kernel before has left
// a note of a NaN in p.found_nan. Without kWithSums that is all it does, and it may start early.
#include "attn/params.cuh"
#include "attn/physical_row.cuh"
#include "attn/rows.cuh"
#include "attn/sequence.cuh"
#include "portable/gradient_unit.cuh"
#include "portable/gradients_alone.cuh"
#include "portable/rewrite_gradients.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"
#include "tile/nan.cuh"

namespace backward_finish {

using namespace config;
using C = target::Mma<Element>::C;

constexpr int kWaves = kThreads / target::kWave;
// More would not fit, and the compiler would then take as many registers as it likes.
constexpr int kBlocksThatFit = target::kThreadsOfSm / kThreads;
constexpr int kBlocks = kBlocksPerSm < kBlocksThatFit ? kBlocksPerSm : kBlocksThatFit;
constexpr int kChunk = kCopyBytes / int(sizeof(Element));
// The columns of a piece of a row, which a lane has. A block of 16 is read in whole quads, and put in order in
// registers.
constexpr int kPiece = sizeof(Element) == 2 && kCopyBytes == 16 ? 16 : kChunk;
constexpr int kPieces = (kHeadDim + kPiece - 1) / kPiece;

// The row of a wave, and its share of the row's pieces, head by head: kWave neighbouring ones of every
// `shares * kWave`.
struct Work {
  PhysicalRow row;
  int share, shares;

  DEVICE Work(const BackwardParams& p, int64 wave)
      : row(physical_row<true>(p.forward.q_side, p.forward.batch, wave >> p.query_row_shift)),
        share(static_cast<int>(wave & ((1 << p.query_row_shift) - 1))),
        shares(1 << p.query_row_shift) {}
};

// Loads the sums of columns from `first` on. sums: those of the row and head.
DEVICE void load_piece(float (&x)[kPiece], const float* sums, int first) {
  if constexpr (kPiece == 16) {
    struct alignas(16) Quad {
      float x[4];
    };
    Quad quads[4];
    UNROLL for (int n = 0; n < 4; n++) quads[n] = reinterpret_cast<const Quad*>(sums + first)[n];
    UNROLL for (int j = 0; j < 16; j++) x[j] = quads[C::position(j) / 4].x[C::position(j) % 4];
  } else {
    UNROLL for (int j = 0; j < kPiece; j++) x[j] = sums[(first + j) / 16 * 16 + C::position((first + j) % 16)];
  }
}

// Computes dq of a row. Returns whether the lane's part may have a NaN of a hidden key.
DEVICE bool finish_row(const BackwardParams& p, const Work& work, int lane) {
  const ForwardParams& f = p.forward;
  const PhysicalRow& own = work.row;
  const float* const sums = p.dq_sum + (own.batch * f.q_side.rows + own.row) * f.nheads_q * kDqPitch;
  Element* const dq = row_at<Element>(p.dq, p.dq_strides, own.batch, own.row);
  NanSum<Element> nan;
  const float factor = f.scores.scale * kFromGradientUnit;
  for (int i = work.share * target::kWave + lane; i < f.nheads_q * kPieces; i += work.shares * target::kWave) {
    const int head = i / kPieces;
    const int first = i % kPieces * kPiece;
    float x[kPiece];
    load_piece(x, sums + int64(head) * kDqPitch, first);
    UNROLL for (int column = 0; column < kPiece; column += kChunk) {
      if (kHeadDim % kPiece != 0 && first + column >= kHeadDim) break;
      Chunk<kCopyBytes> chunk;
      UNROLL for (int j = 0; j < kChunk; j++) {
        reinterpret_cast<Element*>(&chunk)[j] = target::from_float<Element>(factor * x[column + j]);
      }
      *reinterpret_cast<Chunk<kCopyBytes>*>(dq + head * p.dq_strides.head + first + column) = chunk;
      if constexpr (kHidesFromSome) nan.add_stored(chunk);
    }
  }
  return kHidesFromSome && nan.any();
}

// Computes NaN of a wave's share of its row again.
DEVICE void rewrite_row(const BackwardParams& p, const Work& work, int lane) {
  const ForwardParams& f = p.forward;
  const PhysicalRow& own = work.row;
  const int pieces = f.nheads_q * kPieces;
  const Span q = span_of(f.q_side, own.sequence), k = span_of(f.k_side, own.sequence);
#pragma unroll 1
  for (int first = work.share * target::kWave; first < pieces; first += work.shares * target::kWave) {
    const int end = target::wave_uniform(first + target::kWave < pieces ? first + target::kWave : pieces);
#pragma unroll 1
    for (int head = first / kPieces; head * kPieces < end; head++) {
      const int begin = first - head * kPieces, behind = end - head * kPieces;
      const gradients_alone::Columns columns{(begin > 0 ? begin : 0) * kPiece,
                                             (behind < kPieces ? behind : kPieces) * kPiece};
      const gradients_alone::Pairs pairs(p, own.sequence, head, q, k);
      Element* const dq = row_at<Element>(p.dq, p.dq_strides, own.batch, own.row, head);
      gradients_alone::rewrite_query(pairs, own.at, dq, columns, lane);
    }
  }
}

// Computes NaN of gradients again. of_row: whether the wave's row of dq has some. A call of its own, for which the
// kernel keeps nothing in registers or on the stack.
OUT_OF_LINE void rewrite(const BackwardParams& p, bool of_row) {
  const int lane = target::reload_thread_index() % target::kWave;
  const int64 wave = int64(target::block_index()) * kWaves + target::reload_thread_index() / target::kWave;
  if (target::wave_any(of_row)) {
    target::wave_sync();  // a vote does not order the stores of the row's lanes before loads of other lanes
    rewrite_row(p, Work(p, wave), lane);
  }
  if (*p.found_nan != 0) {
    gradients_alone::rewrite_gradients<!kWithSums>(p, wave, int64(target::grid_size()) * kWaves, lane);
  }
}

}  // namespace backward_finish

KERNEL LAUNCH_BOUNDS(config::kThreads,
                     backward_finish::kBlocks) void rawattn_backward_finish(PARAMETER BackwardParams p) {
  using namespace backward_finish;
  const int lane = target::thread_index() % target::kWave;
  bool nan = false;
  if constexpr (!kWithSums) target::wait_for_prior_kernels();
  if constexpr (kWithSums) {
    const Work work(p, int64(target::block_index()) * kWaves + target::thread_index() / target::kWave);
    if (work.row.logical) nan = finish_row(p, work, lane);
  }
  if constexpr (kHidesFromSome) {
    if (target::wave_any(nan || *p.found_nan != 0)) rewrite(p, nan);
  }
}
