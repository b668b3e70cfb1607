// Attention of few query rows to many keys, on any target: what takes time is to read the keys (Flash-Decoding, Dao et
// al. 2023).
//
// The rows of a block are those of kTileQ queries in all kHeads heads that share its keys: query by query, head by
// head. Its waves take key tiles in turn, all rows each. A wave has a ring of key tiles to itself, so it waits for
// nobody: while it computes one tile, kStages - 1 others of its own are on their way. In the end the waves' rows become
// one in shared memory, and where several blocks share a query tile, those of the blocks too (attn/splits.cuh).
#include "attn/pages.cuh"
#include "attn/params.cuh"
#include "attn/rows.cuh"
#include "attn/schedule/queries.cuh"
#include "attn/score_rule.cuh"
#include "attn/scores.cuh"
#include "attn/sequence.cuh"
#include "attn/softmax.cuh"
#include "attn/splits.cuh"
#include "attn/tiles.cuh"
#include "attn/visible.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"
#include "tile/multiply.cuh"

namespace decode {

using namespace config;
using M = target::Mma<Element>;
using C = M::C;

constexpr int kThreads = kWaves * target::kWave;
constexpr int kRowBlocks = kTileRows / 16;
constexpr int kKeyBlocks = kTileK / 16;
constexpr int kDepthQk = round_up(kHeadDim, 16);
constexpr int kDepthV = round_up(kHeadDimV, 16);
constexpr int kOutBlocks = kDepthV / 16;
static_assert(kRowBlocks * 16 == kTileRows && kKeyBlocks * 16 == kTileK, "tiles are made of 16 x 16 blocks");
static_assert(kTileQ * kHeads <= kTileRows && kTileQ > 0, "a tile has room for its rows");
static_assert(kStages >= 2, "one tile is computed while others are on their way");

constexpr int kPitchQk = padded_pitch<Element>(kDepthQk);
constexpr int kPitchV = padded_pitch<Element>(kDepthV);
constexpr int kPitchP = padded_pitch<Element>(kTileK);

// Elements of shared memory: the queries, then of each wave its ring, and probabilities where they go through memory.
constexpr int kStageElements = kTileK * (kPitchQk + kPitchV);
constexpr int kRingElements = kStages * kStageElements;
constexpr int kWaveElements = kRingElements + (M::kAccumulatorFeedsA ? 0 : kTileRows * kPitchP);
constexpr int kRingsAt = kTileRows * kPitchQk;
using Partial = PiecePartial<C, kRowBlocks, kOutBlocks>;
static_assert(sizeof(Partial) == kPartialBytes, "the host's is the same");
// Behind the last product the waves' rows take the place of all of it, and then the output.
constexpr int kUsedBytes = (kRingsAt + kWaves * kWaveElements) * int(sizeof(Element));
constexpr int kMergeBytes = kOutBytes + (kWaves - 1) * kPartialBytes;
static_assert(kTileRows * kPitchV * int(sizeof(Element)) <= kOutBytes && kOutBytes % 16 == 0, "the output has room");
static_assert(kSharedBytes == (kUsedBytes > kMergeBytes ? kUsedBytes : kMergeBytes), "the host computes the same size");

using CopyQ = RowCopy<Element, kTileRows, kHeadDim, kDepthQk, kPitchQk, kThreads, kCopyBytes>;
using CopyK = RowCopy<Element, kTileK, kHeadDim, kDepthQk, kPitchQk, target::kWave, kCopyBytes>;
using CopyV = RowCopy<Element, kTileK, kHeadDimV, kDepthV, kPitchV, target::kWave, kCopyBytes>;
using CopyOut = RowCopy<Element, kTileRows, kHeadDimV, kDepthV, kPitchV, kThreads, kCopyBytes>;
using Visible = VisibleKeys<kLeft, kRight, kTopLeft>;
using Softmax = OnlineSoftmax<C, kRowBlocks>;

constexpr int kSteps = kDepthQk / M::kDepth;
constexpr int kUnrolledSteps = M::kDepth == 16 ? 16 : 4;

// What the rows of a tile see: row r is one of query first + r / kHeads.
struct RowsVisible {
  static constexpr bool kLimitedLeft = kLeft, kLimitedRight = kRight;

  const Visible& visible;
  int first, sink;

  DEVICE RowLimits row(int r) const { return visible.row(first + r / kHeads); }
};

}  // namespace decode

KERNEL LAUNCH_BOUNDS(decode::kThreads, config::kBlocksPerSm) void rawattn_decode(PARAMETER ForwardParams p) {
  using namespace decode;
  SHARED_MEMORY(shared, kSharedBytes);
  Element* const elements = reinterpret_cast<Element*>(shared);
  const int thread = target::thread_index();
  const int lane = thread % target::kWave;
  const int wave = thread / target::kWave;

  const int64 tile = kSplit ? target::block_index() / p.splits.count : target::block_index();
  WorkTile work = find_work_tile<kRagged, kRight, kTileQ, kHeads>(p, tile);
  if (!work.exists) return;
  if constexpr (kPaged) work.k.length = length_in_pages(p.pages, work.sequence, work.k.length);
  const int first = work.tile * kTileQ;
  const int queries = work.q.length - first < kTileQ ? work.q.length - first : kTileQ;
  const int rows = queries * kHeads;
  const int kv_head = work.head / (p.nheads_q / p.nheads_kv);
  const Visible visible(p, work.q.length, work.k.length);
  const KeyTiles<Visible, kTileQ, kTileK> key_tiles(visible, first, first + queries - 1);
  TileSpan span = key_tiles;
  Piece piece;
  if constexpr (kSplit) {
    piece = Piece(p.splits, target::block_index(), span.count());
    if (!piece.exists()) return;
    span = piece.of(span);
  }
  const ScoreRule rule(p, work.sequence, work.head, work.q.length, work.k.length, visible.offset);
  const RowsVisible rows_visible{visible, first, visible.sink};

  const auto q = rows_of_heads<kHeads, const Element>(p.q, p.q_strides, work.sequence, work.q, work.head, first);
  const auto k = rows_of_keys<kPaged, const Element>(p.k, p.k_strides, p.pages, work.sequence, work.k, kv_head);
  const auto v = rows_of_keys<kPaged, const Element>(p.v, p.v_strides, p.pages, work.sequence, work.k, kv_head);
  const Reach<kPaged && (kLeft || kRight)> reach(visible, first, first + queries - 1);
  Element* const ring = elements + kRingsAt + wave * kWaveElements;
  Element* const slab = ring + kRingElements;

  // The n-th tile of the wave, in the n-th slot of its ring. Nothing where it has no such tile.
  const auto load = [&](int n) {
    const int own = span.begin + n * kWaves + wave;
    if (own < span.end) {
      const int row = key_tiles.first_key(own);
      const auto real = reach.rows(row, work.k.length - row);
      Element* const keys = ring + n % kStages * kStageElements;
      CopyK::load(keys, k.from(row), real, lane);
      CopyV::load(keys + kTileK * kPitchQk, v.from(row), real, lane);
    }
    target::copy_async_commit();
  };

  CopyQ::load(elements, q, rows, thread);
  target::copy_async_commit();
  target::copy_async_wait();
  target::block_sync();
#pragma unroll 1
  for (int n = 0; n < kStages - 1; n++) load(n);

  Softmax softmax(kScaleFirst || ScoreRule::kScaled ? Exponent::kUnit : p.scores.scale * Exponent::kUnit);
  C o[kRowBlocks][kOutBlocks];
  UNROLL for (int m = 0; m < kRowBlocks; m++) { UNROLL for (int d = 0; d < kOutBlocks; d++) o[m][d] = C{}; }
  AddedScores<C, kRowBlocks, kKeyBlocks> added;  // nothing: what adds to scores is not for this kernel

#pragma unroll 1
  for (int n = 0; span.begin + n * kWaves + wave < span.end; n++) {
    // The tile is there for all lanes, and all are done with the one before, whose slot is filled anew.
    target::copy_async_wait<kStages - 2>();
    target::wave_sync();
    load(n + kStages - 1);

    const int first_key = key_tiles.first_key(span.begin + n * kWaves + wave);
    const Element* const keys = ring + n % kStages * kStageElements;
    C s[kRowBlocks][kKeyBlocks];
    const auto query = [&](int m, int step) {
      return M::load_a(elements + m * 16 * kPitchQk + step * M::kDepth, kPitchQk, lane);
    };
    multiply_rows<M, kSteps, kUnrolledSteps, kPitchQk>(s, query, keys, lane);
    if constexpr (ScoreRule::kRemakes) remake_scores(s, rule, first, first_key, lane, NoVisit{});
    const SoftmaxScore<kScaleFirst> finish{p.scores.scale};
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int b = 0; b < kKeyBlocks; b++) {
        UNROLL for (int e = 0; e < C::kElements; e++) s[m][b].x[e] = finish(s[m][b].x[e], m, b, e, added);
      }
    }
    const Edges edges = visible.edges(first_key, first_key + kTileK - 1, first, first + queries - 1);
    mask_scores(s, finish.masked(), rows_visible, edges, 0, first_key, lane, NoVisit{});
    if (softmax.update_row_max(s, added)) softmax.rescale(o);
    softmax.exponentiate(s);
    multiply_accumulators<M, kUnrolledSteps, kPitchV, kPitchP>(o, s, slab, keys + kTileK * kPitchQk, lane);
  }
  softmax.sum_rows();

  // Wave 0 joins the others' rows to its own.
  target::copy_async_wait();
  target::block_sync();
  Partial* const partials = reinterpret_cast<Partial*>(shared + kOutBytes);
  if (wave > 0) partials[wave - 1].leave(o, softmax, lane);
  target::block_sync();
  if (wave == 0) {
#pragma unroll 1
    for (int n = 0; n < kWaves - 1; n++) partials[n].join(o, softmax, lane);
  }
  if constexpr (kSplit) {
    unsigned* const flag = reinterpret_cast<unsigned*>(shared);
    if (!merge_pieces<1>(p.splits, piece, tile, o, softmax, flag, wave == 0)) return;
    target::block_sync();  // all have read the flag
  }
  if (wave == 0) {
    if constexpr (kSinkLogits) {
      softmax.add_sinks([&](int m, int slot) {
        const int head = work.head + (m * 16 + C::row(lane, slot)) % kHeads;
        return per_head(p.sink_logits, work.sequence, head) * Exponent::kUnit;
      });
      softmax.rescale(o);
    }
    softmax.divide(o);
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int d = 0; d < kOutBlocks; d++) {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          elements[(m * 16 + C::row(lane, C::slot(e))) * kPitchV + d * 16 + C::column(lane, e)] =
              target::from_float<Element>(o[m][d].x[e]);
        }
      }
      if (p.lse != nullptr) {
        UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
          const int row = m * 16 + C::row(lane, slot);
          if (C::column(lane, 0) == 0 && row < rows) {
            p.lse[work.sequence * p.lse_batch + (work.head + row % kHeads) * p.lse_head + work.q.start + first +
                  row / kHeads] = softmax.lse(m, slot);
          }
        }
      }
    }
  }
  target::block_sync();
  const auto out = rows_of_heads<kHeads, Element>(p.out, p.out_strides, work.sequence, work.q, work.head, first);
  CopyOut::store(out, rows, elements, thread);
}
