// Attention forward on any target: one block computes one query tile of one head (FlashAttention-2, Dao 2023).
//
// Each wave owns kRowBlocks * 16 query rows, holds their scores and output in registers and walks the key tiles. Keys
// and values arrive by asynchronous copies. With two stages, the next tile's keys and values travel under this tile's
// softmax and P V. With one stage, a tile's values travel under its Q K^T, and the next keys under the softmax and P V.
// Where keys are split (split-KV), several blocks share a query tile (attn/splits.cuh).
#include "attn/added_scores.cuh"
#include "attn/dropout.cuh"
#include "attn/exponent.cuh"
#include "attn/key_order.cuh"
#include "attn/listed_tiles.cuh"
#include "attn/mask_bits.cuh"
#include "attn/pages.cuh"
#include "attn/params.cuh"
#include "attn/row_alone.cuh"
#include "attn/rows.cuh"
#include "attn/schedule/queries.cuh"
#include "attn/score_rule.cuh"
#include "attn/scores.cuh"
#include "attn/sequence.cuh"
#include "attn/softmax.cuh"
#include "attn/splits.cuh"
#include "attn/stored_keys.cuh"
#include "attn/visible.cuh"
#include "target/target.cuh"
#include "tile/copy.cuh"
#include "tile/multiply.cuh"

namespace forward {

using namespace config;
using M = target::Mma<Operand>;
using C = M::C;

constexpr int kThreads = kWaves * target::kWave;
constexpr int kRowBlocks = kTileQ / (16 * kWaves);  // 16-row blocks of a wave
constexpr int kWaveRows = 16 * kRowBlocks;
constexpr int kKeyBlocks = kTileK / 16;
constexpr int kDepthQk = round_up(kHeadDim, 16);
constexpr int kDepthV = round_up(kHeadDimV, 16);
constexpr int kOutBlocks = kDepthV / 16;
static_assert(kRowBlocks * 16 * kWaves == kTileQ && kKeyBlocks * 16 == kTileK, "tiles are made of 16 x 16 blocks");
static_assert(!kSplit || sizeof(PiecePartial<C, kRowBlocks, kOutBlocks>) == kPartialBytes, "the host's is the same");
static_assert(kStages == 1 || kStages == 2, "one or two stages of keys and values");

constexpr int kPitchQk = padded_pitch<Element>(kDepthQk);
constexpr int kPitchOut = padded_pitch<Element>(kDepthV);
constexpr int kPitchP = padded_pitch<Element>(kTileK);
constexpr int kPitchK = padded_pitch<StoredKey>(kDepthQk);
constexpr int kPitchV = padded_pitch<StoredKey>(kDepthV);

// How many Elements of shared memory `count` stored keys or values take, which may have 8 bits.
DEVICE constexpr int elements_for_stored_keys(int count) {
  return count * int(sizeof(StoredKey)) / int(sizeof(Element));
}

// The layout of shared memory, in Elements. The output is stored through the space of the queries (and of the first
// keys if it is wider).
constexpr int kKeysAt = kTileQ * kPitchQk;
constexpr int kValuesAt = kKeysAt + elements_for_stored_keys(kStages * kTileK * kPitchK);
constexpr int kProbabilitiesAt = kValuesAt + elements_for_stored_keys(kStages * kTileK * kPitchV);
constexpr int kElementsUsed = kProbabilitiesAt + (M::kAccumulatorFeedsA ? 0 : kTileQ * kPitchP);
constexpr int kElementsOut = kTileQ * kPitchOut;
constexpr int kBytesNeeded = (kElementsUsed > kElementsOut ? kElementsUsed : kElementsOut) * int(sizeof(Element));
static_assert(kBytesNeeded == kSharedBytes, "the host computes the same size");

using CopyQ = RowCopy<Element, kTileQ, kHeadDim, kDepthQk, kPitchQk, kThreads, kCopyBytes>;
using CopyK = RowCopy<StoredKey, kTileK, kHeadDim, kDepthQk, kPitchK, kThreads, kKeyBytes>;
using CopyV = RowCopy<StoredKey, kTileK, kHeadDimV, kDepthV, kPitchV, kThreads, kKeyBytes>;
using CopyOut = RowCopy<Element, kTileQ, kHeadDimV, kDepthV, kPitchOut, kThreads, kCopyBytes>;
using Visible = VisibleKeys<kLeft, kRight, kTopLeft, kPositions>;
using Tiles = MeetingTiles<kBlockMask, Visible, kTileQ, kTileK, key_tile_order<Visible>()>;

constexpr int kSteps = kDepthQk / M::kDepth;
// How many steps of a product are unrolled. float32 products are shallow and have many steps: code for all of them
// would cost the compiler more time than it saves the GPU. Wide rows of float8 have few unrolled steps, since many
// conversions at once take too many registers.
constexpr int kUnrolledSteps = M::kDepth != 16 ? 4 : kFloat8 && kDepthQk > 128 ? 2 : 16;

// A long chain of float32 additions loses accuracy. So in float32 the output is summed over kTilesPerPartialSum key
// tiles at a time, and these sums are added up, unless the second accumulator would take too many registers.
constexpr bool kPartialOutputSums = sizeof(Element) == 4 && kRowBlocks * kOutBlocks * C::kElements <= 64;
constexpr int kTilesPerPartialSum = kTileK < 256 ? 256 / kTileK : 1;

// The wave's queries as operands: read once into registers, or from shared memory at every use.
struct Queries {
  const Operand* rows;
  typename M::A held[kQueryInRegisters ? kRowBlocks : 1][kQueryInRegisters ? kSteps : 1];

  DEVICE void hold(int lane) {
    if constexpr (kQueryInRegisters) {
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int step = 0; step < kSteps; step++) {
          held[m][step] = load_queries<M>(rows + m * 16 * kPitchQk + step * M::kDepth, kPitchQk, lane);
        }
      }
    }
  }
  DEVICE typename M::A operator()(int m, int step, int lane) const {
    if constexpr (kQueryInRegisters) return held[m][step];
    return load_queries<M>(rows + m * 16 * kPitchQk + step * M::kDepth, kPitchQk, lane);
  }
};

// The number of a block's query tile. The blocks that split its keys have the same.
DEVICE int64 tile_number(const ForwardParams& p, int block) { return kSplit ? block / p.splits.count : block; }

DEVICE WorkTile find_tile(const ForwardParams& p, int64 tile) {
  WorkTile work = find_work_tile<kRagged, kRight, kTileQ>(p, OrderOfWaves<>{p.order}, tile);
  if constexpr (kPaged) {
    if (work.exists) work.k.length = length_in_pages(p.pages, work.sequence, work.k.length);
  }
  return work;
}

// Computes the NaN columns of the tile's rows again (attn/row_alone.cuh). The tile is found anew: to keep it all along
// would take registers.
DEVICE void rewrite_nan(const ForwardParams& p) {
  const WorkTile work = find_tile(p, tile_number(p, target::wave_uniform(target::block_index())));
  const auto out = rows_of<Element>(p.out, p.out_strides, work.sequence, work.q, work.head);
  const int wave = target::wave_uniform(target::reload_thread_index() / target::kWave);
  const int first = work.tile * kTileQ + wave * kWaveRows;
#pragma unroll 1
  for (int row = first; row < first + kWaveRows; row++) {
    if (!target::wave_any(row < work.q.length)) break;
    attend_alone(p, work.sequence, work.head, row, work.q, work.k, out.from(row).address());
  }
}

}  // namespace forward

KERNEL LAUNCH_BOUNDS(forward::kThreads, config::kBlocksPerSm) void rawattn_forward(PARAMETER ForwardParams p) {
  using namespace forward;
  SHARED_MEMORY(shared, kSharedBytes);
  Element* const elements = reinterpret_cast<Element*>(shared);
  const int thread = target::thread_index();
  const int lane = thread % target::kWave;
  const int wave = thread / target::kWave;

  const int64 tile = tile_number(p, target::block_index());
  const WorkTile work = find_tile(p, tile);
  if (!work.exists) return;
  const int first = work.tile * kTileQ;
  const int rows = work.q.length - first < kTileQ ? work.q.length - first : kTileQ;
  const int kv_head = work.head / (p.nheads_q / p.nheads_kv);
  const Visible visible(p, work.sequence, work.q.length, work.k.length);
  auto key_tiles = Tiles::keys(p, visible, work.sequence, work.q, work.head, work.tile);
  Piece piece;
  if constexpr (kSplit) {
    piece = Piece(p.splits, target::block_index(), key_tiles.count());
    if (!piece.exists()) return;
    static_cast<TileSpan&>(key_tiles) = piece.of(key_tiles);
  }
  ScoreRule rule(p, work.sequence, work.head, work.q.length, work.k.length, visible.offset);
  const DropoutRule dropout(p, work.sequence, work.head);

  const auto q = rows_of<const Element>(p.q, p.q_strides, work.sequence, work.q, work.head, first);
  const auto k = rows_of_keys<kPaged, const StoredKey>(p.k, p.k_strides, p.pages, work.sequence, work.k, kv_head);
  const auto v = rows_of_keys<kPaged, const StoredKey>(p.v, p.v_strides, p.pages, work.sequence, work.k, kv_head);
  const VisibleRange<kPaged && (kLeft || kRight)> range(visible, first, first + rows - 1);

  const auto keys_of = [&](int n) {
    return reinterpret_cast<StoredKey*>(elements + kKeysAt) + n % kStages * kTileK * kPitchK;
  };
  const auto values_of = [&](int n) {
    return reinterpret_cast<StoredKey*>(elements + kValuesAt) + n % kStages * kTileK * kPitchV;
  };
  const auto load_keys = [&](int n) {
    const int row = key_tiles.first_key(n);
    StoredKey* const tile = keys_of(n);
    CopyK::load(tile, k.from(row), range.rows(row, work.k.length - row), thread);
  };
  const auto load_values = [&](int n) {
    const int row = key_tiles.first_key(n);
    const auto real = rows_to_copy<kBlockMask>(p.block_mask, work.sequence, work.head, 1, row, work.k.length - row,
                                               is_partial<kBlockMask>(key_tiles, n));
    StoredKey* const tile = values_of(n);
    CopyV::load(tile, v.from(row), range.rows(row, real), thread);
  };
  // After this, all copies issued so far have landed for all threads, and no thread still reads what it read before.
  const auto wait_copies_and_sync = [] {
    target::copy_async_wait();
    target::block_sync();
  };

  CopyQ::load(elements, q, rows, thread);
  if (key_tiles.count() > 0) {
    load_keys(key_tiles.begin);
    if constexpr (kStages == 2) load_values(key_tiles.begin);
  }
  target::copy_async_commit();

  if constexpr (kConvertsQueries) {  // each wave converts its own rows
    wait_copies_and_sync();
    const QueryTile<kWaveRows, kDepthQk, kPitchQk> tile{elements + wave * kWaveRows * kPitchQk};
    const int exponent = tile.exponent(lane);
    target::wave_sync();
    tile.convert(exponent, lane, target::kWave);
    target::wave_sync();
    rule.key_factor *= target::float_of(static_cast<unsigned>(exponent) << 23);
  }

  Queries queries;
  queries.rows = reinterpret_cast<const Operand*>(elements) + wave * kWaveRows * kPitchQk;
  Operand* const slab = reinterpret_cast<Operand*>(elements) + kProbabilitiesAt + wave * kWaveRows * kPitchP;
  OnlineSoftmax<C, kRowBlocks> softmax(kScaleFirst || ScoreRule::kGivesScaledScores ? Exponent::kUnit
                                                                                    : rule.scale() * Exponent::kUnit);
  C o[kRowBlocks][kOutBlocks];
  C sum[kRowBlocks][kPartialOutputSums ? kOutBlocks : 1];  // of the key tiles before those that o sums
  UNROLL for (int m = 0; m < kRowBlocks; m++) { UNROLL for (int d = 0; d < kOutBlocks; d++) o[m][d] = C{}; }
  if constexpr (kPartialOutputSums) {
    UNROLL for (int m = 0; m < kRowBlocks; m++) { UNROLL for (int d = 0; d < kOutBlocks; d++) sum[m][d] = C{}; }
  }
  const auto add_to_sum = [&] {
    if constexpr (kPartialOutputSums) {
      UNROLL for (int m = 0; m < kRowBlocks; m++) {
        UNROLL for (int d = 0; d < kOutBlocks; d++) {
          UNROLL for (int e = 0; e < C::kElements; e++) sum[m][d].x[e] += o[m][d].x[e];
          o[m][d] = C{};
        }
      }
    }
  };
  if constexpr (kQueryInRegisters) {
    wait_copies_and_sync();
    queries.hold(lane);
  }

  using Added = AddedScores<C, kRowBlocks, kKeyBlocks>;
  const bool lines_by_step = Added::can_step_lines(rule, first + wave * kWaveRows, lane);
#pragma unroll 1
  for (int n = key_tiles.begin; n < key_tiles.end; n++) {
    wait_copies_and_sync();
    if constexpr (kStages == 1) {
      load_values(n);
      target::copy_async_commit();
    }

    const int first_row = first + wave * kWaveRows;
    Added added;
    added.lines_by_step = lines_by_step;
    added.load(rule, first_row, key_tiles.first_key(n), lane);
    TileMaskBits<kBlockMask, C, kRowBlocks, kKeyBlocks> seen;
    seen.load(key_tiles, n, first_row, lane);
    RandomTile<C, kRowBlocks, kKeyBlocks> random;
    random.generate(dropout, first_row, key_tiles.first_key(n), lane);
    C s[kRowBlocks][kKeyBlocks];
    const auto query = [&](int m, int step) { return queries(m, step, lane); };
    const StoredKey* const keys = keys_of(n);
    product_with_rows<M, kSteps, kUnrolledSteps>(s, query, pitched_tile<kPitchK>(keys), lane);
    if constexpr (kStages == 2) {
      // Issued behind the product: issuing copies takes a while, and the product must not wait for it.
      if (n + 1 < key_tiles.end) {
        load_keys(n + 1);
        load_values(n + 1);
      }
    } else {
      wait_copies_and_sync();
      if (n + 1 < key_tiles.end) load_keys(n + 1);
    }
    target::copy_async_commit();

    finish_scores(s, rule, added, SoftmaxScore<kScaleFirst>{rule.scale()}, key_tiles, n, first_row, lane);
    seen.hide(s, -target::infinity(), lane, added.bias_clearer());
    if (softmax.update_row_max(s, added)) {
      softmax.rescale(o);
      if constexpr (kPartialOutputSums) softmax.rescale(sum);
    }
    softmax.exponentiate(s);
    random.drop(s, dropout, lane);
    const StoredKey* const values = values_of(n);
    multiply_accumulators<M, kUnrolledSteps, kPitchP>(o, s, slab, pitched_tile<kPitchV>(values), lane);
    if constexpr (kPartialOutputSums) {
      if (n % kTilesPerPartialSum == kTilesPerPartialSum - 1) add_to_sum();
    }
  }

  softmax.sum_rows();
  if constexpr (kPartialOutputSums) {
    add_to_sum();
    UNROLL for (int m = 0; m < kRowBlocks; m++) { UNROLL for (int d = 0; d < kOutBlocks; d++) o[m][d] = sum[m][d]; }
  }
  if constexpr (kSplit) {
    wait_copies_and_sync();
    unsigned* const flag = reinterpret_cast<unsigned*>(shared);
    if (!merge_pieces<kWaves>(p.splits, piece, tile, o, softmax, flag, wave * kWaveRows < rows)) return;
  }
  if constexpr (kSinkLogits) {
    softmax.add_sink(per_head(p.sink_logits, work.sequence, work.head) * Exponent::kUnit);
    softmax.rescale(o);
  }
  softmax.divide(o, (kDropout ? p.dropout.factor : 1.0f) * value_factor(p, work.head));
  const bool nan = has_hidden_nan(o);
  wait_copies_and_sync();
  UNROLL for (int m = 0; m < kRowBlocks; m++) {
    const int block_row = wave * kWaveRows + m * 16;
    UNROLL for (int d = 0; d < kOutBlocks; d++) {
      UNROLL for (int e = 0; e < C::kElements; e++) {
        elements[(block_row + C::row(lane, C::slot(e))) * kPitchOut + d * 16 + output_column<C>(lane, e)] =
            target::from_float<Element>(o[m][d].x[e]);
      }
    }
    if (p.lse != nullptr) {
      UNROLL for (int slot = 0; slot < C::kSlots; slot++) {
        const int row = block_row + C::row(lane, slot);
        if (C::column(lane, 0) == 0 && row < rows) {
          p.lse[work.sequence * p.lse_batch + work.head * p.lse_head + work.q.start + first + row] =
              softmax.lse(m, slot);
        }
      }
    }
  }
  bool any_nan = false;  // in the block
  if constexpr (kHidesFromSome) {
    any_nan = target::block_any(nan);
  } else {
    target::block_sync();
  }
  const auto out = rows_of<Element>(p.out, p.out_strides, work.sequence, work.q, work.head, first);
  CopyOut::store(out, rows, elements, thread);
  if (kHidesFromSome && any_nan) {
    target::block_sync();
    rewrite_nan(p);
  }
}
