// The main kernel of the backward on any target: one block computes dk and dv of one key tile of one kv head, and
// (kWithDq) what the tile adds to dq (FlashAttention-2, Dao 2023).
//
// It walks the query tiles that see its keys, for every query head of the group. Half of the waves own dv, the other
// half dk, in registers. Both halves run the same products on the operands of their role (keys are rows, queries are
// columns):
//
//            product           element-wise                  gradient            both halves
//   dv       S^T = K Q^T       P = exp(S - lse)              dV += P^T dO        dQ = dS K, added to
//   dk       dP^T = V dO^T     dS = P (dP + row_delta)       dK += dS^T Q        memory atomically
//
// Where one key tile has all keys of a sequence and every row sees some of them (kOneKeyTile), dS K is dQ itself, and
// is stored instead of added. Such a block has all that row_delta is made of, too, and makes it where no launch comes
// before (kDeltaRows).
//
// P goes from the half that owns dv to the half that owns dk through shared memory (portable/handover.cuh), dS to all
// waves. A wave owns kKeyBlocks * 16 keys. With kColumnWaves > 1 it has only a share of the queries of S and of the
// columns of its gradient. The half that owns dk has no exponentials to compute, so it also copies the next queries and
// douts. docs/architecture.md shows what runs beside what in a turn of the walk.
#include "attn/dropout.cuh"
#include "attn/listed_tiles.cuh"
#include "attn/mask_bits.cuh"
#include "attn/params.cuh"
#include "attn/rows.cuh"
#include "attn/schedule/keys.cuh"
#include "attn/score_rule.cuh"
#include "attn/scores.cuh"
#include "attn/scores_of_keys.cuh"
#include "attn/sequence.cuh"
#include "portable/backward_block.cuh"
#include "portable/gradient_part.cuh"
#include "portable/gradient_unit.cuh"
#include "portable/handover.cuh"
#include "portable/rewrite_gradients.cuh"
#include "portable/row_delta.cuh"
#include "target/target.cuh"
#include "tile/accumulator.cuh"
#include "tile/copy.cuh"
#include "tile/multiply.cuh"

namespace backward {

// X^T = own rows (keys or values) times rows of the other side (queries or douts). kAccumulate: added to what X holds.
template <bool kAccumulate>
DEVICE void multiply(C (&x)[kKeyBlocks][kQueryBlocks], const Element* own, const Element* other, int lane) {
  const auto operand = [&](int m, int step) {
    return M::load_a(own + m * 16 * kPitch + step * M::kDepth, kPitch, lane);
  };
  if constexpr (kAccumulate) {
    add_product_with_rows<M, kSteps, kUnroll>(x, operand, pitched_tile<kPitch>(other), lane);
  } else {
    product_with_rows<M, kSteps, kUnroll>(x, operand, pitched_tile<kPitch>(other), lane);
  }
}

// gradient += X^T times columns of the other side (queries or douts). X comes from the wave's accumulators, which have
// become operands (become_operand()), or from `tile`, where the wave's keys have all queries.
template <class M>  // a parameter, so that the branch not taken is not instantiated
DEVICE void add_product(C (&gradient)[kKeyBlocks][kDepthBlocks], const C (&x)[kKeyBlocks][kQueryBlocks],
                        const Element* tile, const Element* other, int lane) {
  const auto operand = [&](int m, int step) {
    if constexpr (M::kAccumulatorFeedsA && kColumnWaves == 1) {
      return M::stashed_operand(x[m][step]);
    } else {
      return M::load_a(tile + m * 16 * kPitchP + step * M::kDepth, kPitchP, lane);
    }
  };
  add_product_with_columns<M, kQuerySteps, kQueryUnroll>(gradient, operand, pitched_tile<kPitch>(other), lane);
}

// Copies the tile of the bias from first_row and first_key on. Behind its extents the last row repeats, and keys are 0.
// part: the thread's index in its half.
DEVICE void copy_bias(Element* tile, const Bias& bias, int64 at, int first_row, int first_key, int part) {
  constexpr int kChunk = 16 / int(sizeof(Element)), kChunks = kTileK / kChunk;
  const Element* const data = static_cast<const Element*>(bias.data) + at;
  for (int i = part; i < kTileQ * kChunks; i += kRoleThreads) {
    const int row = i / kChunks, column = i % kChunks * kChunk;
    const int real = first_row + row < bias.rows ? first_row + row : bias.rows - 1;
    const bool exists = first_key + column < bias.keys;
    target::copy_async<16>(tile + row * kPitchBias + column, data + real * bias.row + first_key + column, exists);
  }
}

// Computes NaN of the gradients of a block again where it has all keys of a sequence (kRewrites). Called by all threads
// when these gradients are in memory. It finds the block's work anew, so that nothing is kept for it.
OUT_OF_LINE void rewrite_nan(const BackwardParams& p) {
  const KeyWorkTile work = find_part(p, target::block_index()).work;
  const int thread = target::reload_thread_index();
  gradients_alone::rewrite_sequence(p, work.sequence, work.kv_head, work.q, work.k,
                                    target::wave_uniform(thread / target::kWave), kWaves, thread % target::kWave);
}

}  // namespace backward

KERNEL LAUNCH_BOUNDS(backward::kThreads, config::kBlocksPerSm) void rawattn_backward(PARAMETER BackwardParams p) {
  using namespace backward;
  SHARED_MEMORY(shared, kSharedBytes);
  Element* const elements = reinterpret_cast<Element*>(shared);
  float* const statistics = reinterpret_cast<float*>(elements + kElementsUsed);
  [[maybe_unused]] float* const own_deltas = statistics + kStages * 2 * kTileQ;  // kDeltaRows of them
  const ForwardParams& f = p.forward;
  const int thread = target::thread_index();
  const int lane = thread % target::kWave;
  const int wave = thread / target::kWave;

  const KeyPart found = find_part(p, target::block_index());
  const KeyWorkTile& work = found.work;
  if (!work.exists) return;
  const int first_key = work.tile * kTileK;
  const int keys = work.k.length - first_key < kTileK ? work.k.length - first_key : kTileK;
  auto query_tiles = Tiles::queries(f, Visible(f, work.sequence, work.q.length, work.k.length), work.sequence, work.q,
                                    work.k, work.kv_head, work.tile);
  [[maybe_unused]] const TileSpan met{query_tiles.begin, query_tiles.end};
  const int group = f.nheads_q / f.nheads_kv;
  [[maybe_unused]] const int deltas_of_head = round_up(work.q.length, kTileQ);

  // Of the group's first query head.
  const auto q = rows_of<const Element>(f.q, f.q_strides, work.sequence, work.q, work.kv_head * group);
  const auto dout = rows_of<const Element>(p.dout, p.dout_strides, work.sequence, work.q, work.kv_head * group);
  const int64 first_statistic = work.sequence * f.lse_batch + work.kv_head * group * f.lse_head + work.q.start;

  // Starts the copies of what a turn reads: queries, douts, lse, row_delta and the bias. The half that owns dk does it.
  // The condition is `owns_dk` in another form, with which ptxas makes code that is 5% faster at D 64.
  const auto load = [&](const Turn& turn) {
    if (thread < kRoleThreads) return;
    const int part = thread % kRoleThreads;
    const int row = query_tiles.first_row(turn.n);
    const int valid = work.q.length - row;
    CopyQ::load(elements + kQueriesAt + turn.stage * kTileQ * kPitch, q.shifted(turn.head * f.q_strides.head).from(row),
                valid, part);
    CopyDout::load(elements + kDoutsAt + turn.stage * kTileQ * kPitch,
                   dout.shifted(turn.head * p.dout_strides.head).from(row), valid, part);
    // Rows past the end of the sequence get an lse and a row_delta of 0: their queries and douts are 0, and so is all
    // that comes of them. All kernels but the plain one (kProductsOnly) give them an lse of inf, which makes
    // probabilities 0 whatever is added to scores.
    for (int i = part; i < (kDeltaRows > 0 ? 1 : 2) * kTileQ; i += kRoleThreads) {
      const int at = i % kTileQ;
      const bool is_lse = i < kTileQ;
      float* const own = statistics + turn.stage * 2 * kTileQ + i;
      if (!kProductsOnly && is_lse && at >= valid) {
        *own = target::infinity();
      } else {
        target::copy_async<4>(own, (is_lse ? f.lse : p.row_delta) + first_statistic + turn.head * f.lse_head + row + at,
                              at < valid);
      }
    }
    if constexpr (kBiasTile) {
      const int64 head = work.kv_head * group + turn.head;
      // The second head of a pair uses the bias tile of the first.
      if (!kPairs || turn.head % 2 == 0) {
        copy_bias(elements + kBiasAt + (kPairs ? 0 : turn.stage) * kTileQ * kPitchBias, f.bias,
                  work.sequence * f.bias.batch + head / f.bias.group * f.bias.head, row, first_key, part);
      }
    }
    target::copy_async_commit();
  };
  // After this, all copies issued so far have landed for all threads, and no thread still reads what it read before.
  const auto wait_copies_and_sync = [] {
    target::copy_async_wait();
    target::block_sync();
  };

  const auto k = rows_of<const Element>(f.k, f.k_strides, work.sequence, work.k, work.kv_head, first_key);
  const auto v = rows_of<const Element>(f.v, f.v_strides, work.sequence, work.k, work.kv_head, first_key);
  int first = work.tile;
  // Blocks of other heads and sequences add to the same sums of dbias, so they begin at other query tiles too.
  if constexpr (kDbias == 2) first += 2 * (work.sequence * f.nheads_kv + work.kv_head);
  const auto start = Walk::start(query_tiles, first, group, found.part, found.parts);
  Turn turn = Walk::first(query_tiles, start);
  if (turn.exists) {
    const auto real =
        rows_to_copy<kBlockMask>(f.block_mask, work.sequence, work.kv_head * group, group, first_key, keys, true);
    CopyK::load(elements + kKeysAt, k, real, thread);
    CopyV::load(elements + kValuesAt, v, keys, thread);
    target::copy_async_commit();
    load(turn);
    if constexpr (kDeltaRows > 0) {  // while the copies are in flight
      row_delta::compute(own_deltas, deltas_of_head, p, work.sequence, work.q, work.kv_head * group, group, wave,
                         kWaves, lane);
    }
  }
  if constexpr (DbiasTile::kWrites) {
    for (int head = 0; head < (found.part == 0 ? group : 0); head += f.bias.group) {
      DbiasTile::clear(p, work.sequence, work.kv_head * group + head, first_key, met, thread);
    }
  }

  // (scale / softcap)^2. Times the square of a capped product it is tanh^2, and the softcap's derivative is 1 - tanh^2.
  [[maybe_unused]] float cap_ratio_squared = f.scores.scale * target::reciprocal(f.scores.softcap);
  cap_ratio_squared *= cap_ratio_squared;
  const bool owns_dk = wave >= kRoleWaves;
  const int key = wave % kRoleWaves / kColumnWaves * kKeyBlocks * 16;
  const int column_wave = wave % kColumnWaves;
  const Element* const own = elements + (owns_dk ? kValuesAt : kKeysAt) + key * kPitch;
  Element* const p_tile = elements + kProbabilitiesAt + key * kPitchP;
  Element* const second_weights = elements + kSecondWeightsAt + key * kPitchP;
  const Probability<Element, kUnitShift> probability(ScoreRule::kGivesScaledScores ? 1.0f : AccumulatorStart::scale(f));
  C gradient[kKeyBlocks][kDepthBlocks];
  UNROLL for (int m = 0; m < kKeyBlocks; m++) { UNROLL for (int d = 0; d < kDepthBlocks; d++) gradient[m][d] = C{}; }

  // The dS buffer of the turn before the one that uses `buffer`.
  const auto earlier = [](int buffer) { return kPairs ? (buffer + 2) % 3 : buffer ^ 1; };
  // dQ of a tile is computed in the next turn, when all of the tile's dS is there. Each half of the waves computes a
  // share while the other half has element-wise work. Where scores cost the half that owns dv much, the half that owns
  // dk computes all of it (kDqByHalf). Each half also gives out its share of the tile's dbias.
  const auto add_dq_of = [&](const Turn& turn, int buffer) {
    if (!kPairs || turn.head % 2 == 1) {
      DbiasTile::give_out(p, work.sequence, work.kv_head * group + turn.head, query_tiles.first_row(turn.n), first_key,
                          elements + kScoreGradientsAt + buffer * kTileK * kPitchP,
                          elements + kScoreGradientsAt + earlier(buffer) * kTileK * kPitchP, wave, lane);
    }
    if (wave < kFirstDqWave) return;
    // Counted in rows of kDqPitch floats, dq_sum has the batch stride of lse: rows times heads.
    const int64 row = work.sequence * f.lse_batch + (work.q.start + query_tiles.first_row(turn.n)) * f.nheads_q;
    const auto dq = rows_of<Element>(p.dq, p.dq_strides, work.sequence, work.q, work.kv_head * group + turn.head,
                                     query_tiles.first_row(turn.n));
    const Dq::Result result{dq.first, p.dq_strides.row, f.scores.scale * kFromGradientUnit};
    Dq::add(p.dq_sum + (row + work.kv_head * group + turn.head) * kDqPitch, int64(f.nheads_q) * kDqPitch, result,
            work.q.length - query_tiles.first_row(turn.n), elements + kScoreGradientsAt + buffer * kTileK * kPitchP,
            elements + kKeysAt, wave - kFirstDqWave, lane);
  };
  int buffer = 0;  // of this turn's dS
  Turn before{0, 0, 0, false};
  const auto rule_of = [&](int head) {
    return ScoreRule(f, work.sequence, work.kv_head * group + head, work.q.length, work.k.length,
                     query_tiles.visible.offset);
  };
  AccumulatorStart accumulator_start(rule_of(turn.head));
#pragma unroll 1
  while (turn.exists) {
    wait_copies_and_sync();
    const Turn next = Walk::next(turn, query_tiles, start, group);
    const Element* const queries = elements + kQueriesAt + turn.stage * kTileQ * kPitch;
    const Element* const douts = elements + kDoutsAt + turn.stage * kTileQ * kPitch;
    const int first_row = query_tiles.first_row(turn.n);
    const int columns = column_wave * kQueryBlocks * 16;
    const float* const lse = statistics + turn.stage * 2 * kTileQ + columns;
    const float* const delta =
        kDeltaRows > 0 ? own_deltas + turn.head * deltas_of_head + first_row + columns : lse + kTileQ;
    Element* const ds_tile = elements + kScoreGradientsAt + (buffer * kTileK + key) * kPitchP;
    Element* const weights = kFromRegisters || !Weights::kOwnTile ? p_tile : ds_tile;
    Element* const second = kSecondWeightTile ? second_weights : ds_tile;

    C x[kKeyBlocks][kQueryBlocks];
    if (owns_dk) {
      if (kWithDq && before.exists) add_dq_of(before, earlier(buffer));
      // dP begins with row_delta, so no instruction adds it. With dropout, dP is scaled first and row_delta added
      // later.
      UNROLL for (int m = 0; m < kKeyBlocks; m++) {
        UNROLL for (int b = 0; b < kQueryBlocks; b++) {
          UNROLL for (int e = 0; e < C::kElements; e++) {
            x[m][b].x[e] = kDropout ? 0.0f : delta[b * 16 + C::column(lane, e)];
          }
        }
      }
      multiply<true>(x, own, douts + columns * kPitch, lane);
      // Issued behind the product: issuing copies takes a while, and the product must not wait for it.
      if (kStages == 2 && !kLateCopies && next.exists) load(next);
    } else {
      const int head = work.kv_head * group + turn.head;
      const ScoreRule rule = rule_of(turn.head);
      DropoutMask<C, kKeyBlocks, kQueryBlocks> kept;
      kept.generate_of_keys(DropoutRule(f, work.sequence, head), first_key + key, first_row + columns, lane);
      if constexpr (AccumulatorStart::kAny) {
        UNROLL for (int m = 0; m < kKeyBlocks; m++) {
          UNROLL for (int b = 0; b < kQueryBlocks; b++) {
            UNROLL for (int e = 0; e < C::kElements; e++) x[m][b].x[e] = accumulator_start.of<C>(m, C::slot(e));
          }
        }
      }
      multiply<AccumulatorStart::kAny>(x, own, queries + columns * kPitch, lane);
      if constexpr (kProductsOnly) {
        const AddedScoresOfKeys<C, kKeyBlocks, kQueryBlocks> nothing{};
        finish_scores_of_keys(x, rule, nothing, probability, lse, query_tiles, turn.n, first_key + key,
                              first_row + columns, lane);
        UNROLL for (int m = 0; m < kKeyBlocks; m++) {
          UNROLL for (int b = 0; b < kQueryBlocks; b++) {
            const int at = m * 16 * kPitchP + columns + b * 16;
            if constexpr (!kFromRegisters) store_accumulator<M>(x[m][b], p_tile + at, kPitchP, lane);
            if constexpr (kFromRegisters || Weights::kOwnTile) Weights::store(x[m][b], weights + at, second + at, lane);
            if constexpr (kFromRegisters) become_operand<M>(x[m][b]);
          }
        }
      }
      UNROLL for (int m = 0; m < (kProductsOnly ? 0 : kKeyBlocks); m += kKeyBlocksAtOnce) {
        AddedScoresOfKeys<C, kKeyBlocksAtOnce, kQueryBlocks> added;
        const int bias_stage = kPairs ? 0 : turn.stage;
        const Element* const bias = elements + kBiasAt + (bias_stage * kTileQ + columns) * kPitchBias + key + m * 16;
        added.load(rule, bias, kPitchBias, first_key + key + m * 16, first_row + columns, lane);
        C derivative[kHasDerivative ? kKeyBlocksAtOnce : 1][kHasDerivative ? kQueryBlocks : 1];
        C(&some)[kKeyBlocksAtOnce][kQueryBlocks] = *reinterpret_cast<C(*)[kKeyBlocksAtOnce][kQueryBlocks]>(&x[m]);
        added.add_line_per_score(some, rule, accumulator_start, first_key + key + m * 16, first_row + columns, lane);
        finish_scores_of_keys(some, rule, added, probability, lse, query_tiles, turn.n, first_key + key + m * 16,
                              first_row + columns, lane, [&](int k, int b, int e, int i, int j, float capped) {
                                if constexpr (ScoreRule::kCapsUnscaled) {
                                  derivative[k][b].x[e] = fmaf(capped * capped, -cap_ratio_squared, 1.0f);
                                } else if constexpr (kHasDerivative) {
                                  derivative[k][b].x[e] = rule.derivative(capped, i, j);
                                }
                              });
        hide_by_bits<kBlockMask>(some, 0.0f, f.block_mask, work.sequence, head, query_tiles, turn.n,
                                 first_key + key + m * 16, first_row + columns, lane);
        UNROLL for (int k = 0; k < kKeyBlocksAtOnce; k++) {
          UNROLL for (int b = 0; b < kQueryBlocks; b++) {
            const int at = (m + k) * 16 * kPitchP + columns + b * 16;
            C weight = some[k][b];
            UNROLL for (int e = 0; e < C::kElements; e++) {
              float& p = some[k][b].x[e];
              if constexpr (kHasDerivative) {
                // The weight of a masked element stays 0, whatever a user's derivative is there (it may be NaN).
                weight.x[e] = kScoreMod && p == 0.0f ? 0.0f : p * derivative[k][b].x[e];
              }
              if constexpr (kDropout) {
                weight.x[e] = Weights::marked(weight.x[e], kept.at(m + k, b, e));
                if (!kept.at(m + k, b, e)) p = 0.0f;
              }
            }
            if constexpr (!kFromRegisters) store_accumulator<M>(some[k][b], p_tile + at, kPitchP, lane);
            if constexpr (kFromRegisters || Weights::kOwnTile) Weights::store(weight, weights + at, second + at, lane);
            if constexpr (kFromRegisters) become_operand<M>(some[k][b]);
          }
        }
      }
    }
    sync_weights<kArrivals, kRoleWaves>(owns_dk, wave);
    if (owns_dk) {
      if (kStages == 2 && kLateCopies && next.exists) load(next);
      // Weights are loaded one 16 x 16 block ahead, so all lanes have those of a block when its dS is stored
      // (kFloat32Weights: by the wave_sync() below). dS may be stored where these weights lie, those of other lanes
      // too.
      const bool partial = is_partial<kBlockMask>(query_tiles, turn.n);
      const auto load_weights = [&](int block) {
        const int at = block / kQueryBlocks * 16 * kPitchP + columns + block % kQueryBlocks * 16;
        return Weights::load(weights + at, second + at, lane);
      };
      C ahead = load_weights(0);
      UNROLL for (int m = 0; m < kKeyBlocks; m++) {
        UNROLL for (int b = 0; b < kQueryBlocks; b++) {
          const C weight = ahead;
          const int after = m * kQueryBlocks + b + 1;
          if (after < kKeyBlocks * kQueryBlocks) ahead = load_weights(after);
          UNROLL for (int e = 0; e < C::kElements; e++) {
            float& d = x[m][b].x[e];
            if constexpr (kDropout) {
              d = Weights::is_kept(weight.x[e]) ? d * f.dropout.factor : 0.0f;
              d = Weights::unmarked(weight.x[e]) * (d + delta[b * 16 + C::column(lane, e)]);
            } else {
              d *= weight.x[e];
            }
          }
          // A value that the row does not see may be anything, NaN too, and so may dP: dS must still be 0.
          if (kBlockMask && partial) {
            UNROLL for (int e = 0; e < C::kElements; e++) {
              if (Weights::unmarked(weight.x[e]) == 0.0f) x[m][b].x[e] = 0.0f;
            }
          }
          if constexpr (Weights::kFloat32Weights) target::wave_sync();
          if constexpr (kSharesDs) {
            store_accumulator<M>(x[m][b], ds_tile + m * 16 * kPitchP + columns + b * 16, kPitchP, lane);
          }
          if constexpr (kFromRegisters) become_operand<M>(x[m][b]);
        }
      }
    } else if (kWithDq && kEarlyDq && before.exists) {
      add_dq_of(before, earlier(buffer));
    }
    if constexpr (!kFromRegisters) target::block_sync();
    add_product<M>(gradient, x, owns_dk ? ds_tile : p_tile,
                   (owns_dk ? queries : douts) + column_wave * kDepthBlocks * 16, lane);
    if (kWithDq && !kEarlyDq && !owns_dk && before.exists) add_dq_of(before, earlier(buffer));
    if (kStages == 1 && next.exists) {
      target::block_sync();
      load(next);
    }
    if (kWithDq) buffer = kPairs ? (buffer + 1) % 3 : buffer ^ 1;
    // Computed here, since at the beginning of a turn the product would wait for it.
    if (AccumulatorStart::kAny && next.exists && next.head != turn.head)
      accumulator_start = AccumulatorStart(rule_of(next.head));
    before = turn;
    turn = next;
  }

  wait_copies_and_sync();
  [[maybe_unused]] bool nan = false;
  if (kWithDq && before.exists) {
    add_dq_of(before, earlier(buffer));
    if constexpr (kOneKeyTile && kHidesFromSome) {
      // A NaN in a key that no row sees comes to dq alone. The last row sees all keys that any row sees.
      if (kScoreMod || query_tiles.visible.row(work.q.length - 1).right < work.k.length - 1) {
        nan = CopyK::has_nan(elements + kKeysAt, thread);
      }
      if (kSplit && nan) *p.found_nan = 1;
    }
    target::block_sync();
  }
  const float factor = kFromGradientUnit * (owns_dk ? f.scores.scale : kDropout ? f.dropout.factor : 1.0f);
  if (kSplit && (!kSplitSinks || found.parts > 1)) {
    const PartRows rows = part_rows<kSplitSinks, kRagged>(p, work.sequence, work.k);
    const int64 row = (owns_dk * found.parts + found.part) * rows.rows_per_part + rows.first + first_key + key;
    float* const sums = p.part_sums + (row * f.nheads_kv + work.kv_head) * kDepth + column_wave * kDepthBlocks * 16;
    store_part(gradient, factor, sums, int64(f.nheads_kv) * kDepth, keys - key, lane);
    return;
  }
  Element* const result = elements + (owns_dk ? kKeysAt : kValuesAt) + key * kPitch + column_wave * kDepthBlocks * 16;
  UNROLL for (int m = 0; m < kKeyBlocks; m++) {
    UNROLL for (int d = 0; d < kDepthBlocks; d++) {
      UNROLL for (int e = 0; e < C::kElements; e++) gradient[m][d].x[e] *= factor;
      store_accumulator<M>(gradient[m][d], result + m * 16 * kPitch + d * 16, kPitch, lane);
    }
  }
  target::block_sync();
  const auto dk = rows_of<Element>(p.dk, p.dk_strides, work.sequence, work.k, work.kv_head, first_key);
  const auto dv = rows_of<Element>(p.dv, p.dv_strides, work.sequence, work.k, work.kv_head, first_key);
  if constexpr (kHidesFromSome) {
    const bool nan_of_keys = CopyK::store_and_look(dk, keys, elements + kKeysAt, thread);
    const bool nan_of_values = CopyV::store_and_look(dv, keys, elements + kValuesAt, thread);
    nan = nan || nan_of_keys || nan_of_values;
    // Gradients that have a NaN are computed again: with kRewrites here, else by portable/backward_finish.cu.
    if constexpr (kRewrites) {
      if (target::block_any(nan)) rewrite_nan(p);
    } else if (nan) {
      *p.found_nan = 1;
    }
  } else {
    CopyK::store(dk, keys, elements + kKeysAt, thread);
    CopyV::store(dv, keys, elements + kValuesAt, thread);
  }
}
