// dQ alone, for deterministic gradients: one block computes dq of one query tile of one head. With kCaptured it
// computes the gradients of what a score function captured instead, from the same dS.
//
// A block walks the key tiles that its rows see, as the forward does, and keeps dq in registers. Nothing is added up in
// memory, so the order of additions is always the same. portable/backward.cu without dQ does the rest. Each wave owns
// kRowBlocks * 16 query rows.
#include "attn/added_scores.cuh"
#include "attn/alone.cuh"
#include "attn/listed_tiles.cuh"
#include "attn/mask_bits.cuh"
#include "attn/params.cuh"
#include "attn/rows.cuh"
#include "attn/schedule/queries.cuh"
#include "attn/dropout.cuh"
#include "attn/score_rule.cuh"
#include "attn/scores.cuh"
#include "attn/sequence.cuh"
#include "attn/visible.cuh"
#include "portable/captured_gradients.cuh"
#include "target/target.cuh"
#include "tile/accumulator.cuh"
#include "tile/copy.cuh"
#include "tile/either.cuh"
#include "tile/multiply.cuh"

namespace backward_dq {

using namespace config;
using M = target::Mma<Element>;
using C = M::C;

constexpr int kThreads = kWaves * target::kWave;
constexpr int kRowBlocks = kTileQ / (16 * kWaves);
constexpr int kWaveRows = 16 * kRowBlocks;
constexpr int kKeyBlocks = kTileK / 16;
constexpr int kDepthQk = round_up(kHeadDim, 16);
constexpr int kDepthV = round_up(kHeadDimV, 16);
constexpr int kDqBlocks = kDepthQk / 16;
static_assert(kRowBlocks * 16 * kWaves == kTileQ && kKeyBlocks * 16 == kTileK, "tiles are made of 16 x 16 blocks");
static_assert(kStages == 1 || kStages == 2, "one or two stages of keys and values");
constexpr bool kHasDerivative = ScoreRule::kHasDerivative;

// The layout of shared memory, in Elements. dq is stored through the space of the queries.
constexpr int kPitchQk = padded_pitch<Element>(kDepthQk);
constexpr int kPitchV = padded_pitch<Element>(kDepthV);
constexpr int kPitchDs = padded_pitch<Element>(kTileK);
constexpr int kDoutsAt = kTileQ * kPitchQk;
constexpr int kKeysAt = kDoutsAt + kTileQ * kPitchV;
constexpr int kValuesAt = kKeysAt + kStages * kTileK * kPitchQk;
constexpr int kGradientsAt = kValuesAt + kStages * kTileK * kPitchV;
constexpr int kElementsUsed = kGradientsAt + (M::kAccumulatorFeedsA ? 0 : kTileQ * kPitchDs);
static_assert(kElementsUsed * int(sizeof(Element)) == kSharedBytes, "the host computes the same size");

using CopyQ = RowCopy<Element, kTileQ, kHeadDim, kDepthQk, kPitchQk, kThreads, kCopyBytes>;
using CopyDout = RowCopy<Element, kTileQ, kHeadDimV, kDepthV, kPitchV, kThreads, kCopyBytes>;
using CopyK = RowCopy<Element, kTileK, kHeadDim, kDepthQk, kPitchQk, kThreads, kCopyBytes>;
using CopyV = RowCopy<Element, kTileK, kHeadDimV, kDepthV, kPitchV, kThreads, kCopyBytes>;
using Visible = VisibleKeys<kLeft, kRight, kTopLeft, kPositions>;
using Tiles = MeetingTiles<kBlockMask, Visible, kTileQ, kTileK>;

using Partials = Either<kCaptured, CapturedGradients<C, kRowBlocks, kKeyBlocks>, NoCapturedGradients>::Type;

// X += own rows (queries or douts) times rows of the other side (keys or values)
template <int kDepth, int kPitch>
DEVICE void add_product(C (&x)[kRowBlocks][kKeyBlocks], const Element* own, const Element* other, int lane) {
  constexpr int kSteps = kDepth / M::kDepth;
  const auto operand = [&](int m, int step) {
    return M::load_a(own + m * 16 * kPitch + step * M::kDepth, kPitch, lane);
  };
  add_product_with_rows<M, kSteps, kSteps <= 16 ? kSteps : 4>(x, operand, pitched_tile<kPitch>(other), lane);
}

}  // namespace backward_dq

KERNEL LAUNCH_BOUNDS(backward_dq::kThreads, config::kBlocksPerSm) void rawattn_backward_dq(PARAMETER BackwardParams p) {
  using namespace backward_dq;
  SHARED_MEMORY(shared, kSharedBytes);
  Element* const elements = reinterpret_cast<Element*>(shared);
  const ForwardParams& f = p.forward;
  const int thread = target::thread_index();
  const int lane = thread % target::kWave;
  const int wave = thread / target::kWave;

  const WorkTile work = find_work_tile<kRagged, kRight, kTileQ>(f, OrderOfWaves<>{f.order}, target::block_index());
  if (!work.exists) return;
  const int first = work.tile * kTileQ;
  const int rows = work.q.length - first < kTileQ ? work.q.length - first : kTileQ;
  const int kv_head = work.head / (f.nheads_q / f.nheads_kv);
  const Visible visible(f, work.sequence, work.q.length, work.k.length);
  const auto key_tiles = Tiles::keys(f, visible, work.sequence, work.q, work.head, work.tile);
  const ScoreRule rule(f, work.sequence, work.head, work.q.length, work.k.length, visible.offset);
  const DropoutRule dropout(f, work.sequence, work.head);

  const auto q = rows_of<const Element>(f.q, f.q_strides, work.sequence, work.q, work.head, first);
  const auto dout = rows_of<const Element>(p.dout, p.dout_strides, work.sequence, work.q, work.head, first);
  const auto k = rows_of<const Element>(f.k, f.k_strides, work.sequence, work.k, kv_head);
  const auto v = rows_of<const Element>(f.v, f.v_strides, work.sequence, work.k, kv_head);
  const auto load = [&](int n) {
    const int row = key_tiles.first_key(n);
    const int valid = work.k.length - row;
    const int stage = n % kStages;
    const auto real = rows_to_copy<kBlockMask>(f.block_mask, work.sequence, work.head, 1, row, valid,
                                               is_partial<kBlockMask>(key_tiles, n));
    CopyK::load(elements + kKeysAt + stage * kTileK * kPitchQk, k.from(row), real, thread);
    CopyV::load(elements + kValuesAt + stage * kTileK * kPitchV, v.from(row), valid, thread);
  };
  // After this, all copies issued so far have landed for all threads, and no thread still reads what it read before.
  const auto wait_copies_and_sync = [] {
    target::copy_async_wait();
    target::block_sync();
  };

  CopyQ::load(elements, q, rows, thread);
  CopyDout::load(elements + kDoutsAt, dout, rows, thread);
  if (key_tiles.count() > 0) load(key_tiles.begin);
  target::copy_async_commit();

  // Rows past the end of the sequence get an lse and a row_delta of 0: their queries and douts are 0, and so is all
  // that comes of them.
  RowProbability<Element, kRowBlocks, C::kSlots> probability(ScoreRule::kGivesScaledScores ? 1.0f : f.scores.scale);
  float delta[kRowBlocks][C::kSlots];
  UNROLL for (int m = 0; m < kRowBlocks; m++) {
    UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
      const int row = wave * kWaveRows + m * 16 + C::row(lane, slot);
      const int64 at = work.sequence * f.lse_batch + work.head * f.lse_head + work.q.start + first + row;
      probability.set(m, slot, row < rows ? f.lse[at] : 0.0f);
      delta[m][slot] = row < rows ? p.row_delta[at] : 0.0f;
    }
  }
  const Element* const queries = elements + wave * kWaveRows * kPitchQk;
  const Element* const douts = elements + kDoutsAt + wave * kWaveRows * kPitchV;
  Element* const slab = elements + kGradientsAt + wave * kWaveRows * kPitchDs;
  C dq[kRowBlocks][kDqBlocks];
  UNROLL for (int m = 0; m < kRowBlocks; m++) { UNROLL for (int d = 0; d < kDqBlocks; d++) dq[m][d] = C{}; }
  Partials partials(p, rule, lane);

#pragma unroll 1
  for (int n = key_tiles.begin; n < key_tiles.end; n++) {
    wait_copies_and_sync();
    const Element* const keys = elements + kKeysAt + n % kStages * kTileK * kPitchQk;
    const Element* const values = elements + kValuesAt + n % kStages * kTileK * kPitchV;

    const int first_row = first + wave * kWaveRows;
    AddedScores<C, kRowBlocks, kKeyBlocks> added;
    added.load(rule, first_row, key_tiles.first_key(n), lane);
    TileMaskBits<kBlockMask, C, kRowBlocks, kKeyBlocks> seen;
    seen.load(key_tiles, n, first_row, lane);
    C s[kRowBlocks][kKeyBlocks];
    UNROLL for (int m = 0; m < kRowBlocks; m++) { UNROLL for (int b = 0; b < kKeyBlocks; b++) s[m][b] = C{}; }
    add_product<kDepthQk, kPitchQk>(s, queries, keys, lane);
    // The derivative of each score with respect to its scaled product; with kCaptured the capped product itself.
    C derivative[kHasDerivative ? kRowBlocks : 1][kHasDerivative ? kKeyBlocks : 1];
    finish_scores(s, rule, added, probability, key_tiles, n, first_row, lane,
                  [&](int m, int b, int e, int i, int j, float capped) {
                    if constexpr (kCaptured) {
                      derivative[m][b].x[e] = capped;
                    } else if constexpr (kHasDerivative) {
                      derivative[m][b].x[e] = rule.derivative(capped, i, j);
                    }
                  });
    seen.hide(s, 0.0f, lane);
    C dp[kRowBlocks][kKeyBlocks];
    // dP begins with row_delta, so no instruction adds it. With dropout, dP is scaled first and row_delta added later.
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int b = 0; b < kKeyBlocks; b++) {
        UNROLL for (int e = 0; e < C::kElements; e++) dp[m][b].x[e] = kDropout ? 0.0f : delta[m][C::slot(e)];
      }
    }
    add_product<kDepthV, kPitchV>(dp, douts, values, lane);
    // Issued behind the products: issuing copies takes a while, and products must not wait for it.
    if (kStages == 2 && n + 1 < key_tiles.end) load(n + 1);
    target::copy_async_commit();
    if constexpr (kDropout) {
      for_each_kept<C, kRowBlocks, kKeyBlocks>(
          dropout, first_row, key_tiles.first_key(n), lane,
          [&](int m, int b, int e, bool kept) { dp[m][b].x[e] = kept ? dp[m][b].x[e] * f.dropout.factor : 0.0f; });
    }
    UNROLL for (int m = 0; m < kRowBlocks; m++) {
      UNROLL for (int b = 0; b < kKeyBlocks; b++) {
        UNROLL for (int e = 0; e < C::kElements; e++) {
          float& x = dp[m][b].x[e];
          x = s[m][b].x[e] * (kDropout ? x + delta[m][C::slot(e)] : x);
          // A value that the row does not see may be anything, NaN too, and so may dP.
          if constexpr (kBlockMask || kCaptured) x = s[m][b].x[e] == 0.0f ? 0.0f : x;
          // Where a row's lse is a number, scores that it sees are, and a NaN is of a key that the bias hides.
          if constexpr (kCaptured && kBias > 0) {
            const float lse = probability.lse[m][C::slot(e)];
            if (s[m][b].x[e] != s[m][b].x[e] && lse == lse) x = 0.0f;
          }
          // A masked element stays 0, whatever the derivative is there (it may be NaN).
          if constexpr (kHasDerivative && !kCaptured) x = s[m][b].x[e] == 0.0f ? 0.0f : x * derivative[m][b].x[e];
        }
      }
    }
    if constexpr (kCaptured) {
      partials.add(dp, derivative, first_row, key_tiles.first_key(n));
    } else {
      constexpr int kKeySteps = kTileK / M::kDepth;
      multiply_accumulators<M, kKeySteps <= 8 ? kKeySteps : 4, kPitchDs>(dq, dp, slab, pitched_tile<kPitchQk>(keys),
                                                                         lane);
    }
    if (kStages == 1 && n + 1 < key_tiles.end) {
      target::block_sync();
      load(n + 1);
      target::copy_async_commit();
    }
  }

  wait_copies_and_sync();
  if constexpr (kCaptured) {
    partials.finish();
    return;
  }
  UNROLL for (int m = 0; m < kRowBlocks; m++) {
    UNROLL for (int d = 0; d < kDqBlocks; d++) {
      UNROLL for (int e = 0; e < C::kElements; e++) dq[m][d].x[e] *= f.scores.scale;
      store_accumulator<M>(dq[m][d], elements + (wave * kWaveRows + m * 16) * kPitchQk + d * 16, kPitchQk, lane);
    }
  }
  target::block_sync();
  const auto result = rows_of<Element>(p.dq, p.dq_strides, work.sequence, work.q, work.head, first);
  if constexpr (kHidesFromSome) {
    // Computed again by portable/backward_finish.cu.
    if (CopyQ::store_and_look(result, rows, elements, thread)) *p.found_nan = 1;
  } else {
    CopyQ::store(result, rows, elements, thread);
  }
}
