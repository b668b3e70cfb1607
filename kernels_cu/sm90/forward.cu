// Attention forward for Hopper: persistent blocks, TMA loads, wgmma products (FlashAttention-3, Shah et al. 2024).
//
// Warpgroup 0 is the producer: one of its threads walks the schedule and keeps TMA loads ahead of the consumers
// (sm90/forward_producer.cuh, which also says when more of its warps load). Each of the kConsumers other warpgroups is
// a consumer and owns 64 query rows. In a consumer, the P V product of key tile n - 1 runs in the tensor cores while
// the scores of tile n are masked and searched for new row maxima. The exponentials of tile n overlap with the products
// of other consumers. With kPingPong, consumers take turns at issuing products, so that they do not all need the same
// unit at once. The next query tile and its first keys and values are loaded while the output of this one is stored.
//
// Blocks of a cluster (kCluster > 1) work on neighbouring query tiles at the same time. Each loads a part of the keys
// and values and multicasts it to all: in a cluster of two, half of what a block needs is read from L2 by its
// neighbour.
//
// The last query tile of a sequence may have rows for one consumer alone. Then all consumers work on these rows, each
// on other keys (sm90/forward_shared_keys.cuh).
//
// With kStreamK, the last query tiles, too few to occupy all blocks, are split by keys (stream-K), and their partial
// results are merged (sm90/forward_merge.cuh).
//
// The other headers sm90/forward_*.cuh are parts of this kernel. Constants that no file defines, kCluster among them,
// are the configuration: namespace config of the generated translation unit.
#include "attn/added_scores.cuh"
#include "attn/exponent.cuh"
#include "attn/fill_padding.cuh"
#include "attn/mask_bits.cuh"
#include "attn/score_rule.cuh"
#include "attn/scores.cuh"
#include "sm90/forward_bias.cuh"
#include "sm90/forward_bias_rows.cuh"
#include "sm90/forward_consumer.cuh"
#include "sm90/forward_first_work.cuh"
#include "sm90/forward_float8.cuh"
#include "sm90/forward_key_mask.cuh"
#include "sm90/forward_merge.cuh"
#include "sm90/forward_page_rows.cuh"
#include "sm90/forward_pages.cuh"
#include "sm90/forward_producer.cuh"
#include "sm90/forward_ramp.cuh"
#include "sm90/forward_random.cuh"
#include "sm90/forward_shared_keys.cuh"
#include "sm90/forward_store.cuh"
#include "sm90/forward_work.cuh"
#include "sm90/hidden_values.cuh"

namespace forward {

// The last query row of a consumer whose first one is `first`.
DEVICE int last_query(const WorkTile& work, int first) {
  int behind = first + Rows::kQueryRowsOfConsumer;
  if constexpr (kInterleaved) {
    const int behind_tile = first_query(work) + kTileQ;
    if (behind_tile < behind) behind = behind_tile;
  }
  return (behind < work.q.length ? behind : work.q.length) - 1;
}

// The key tiles of a consumer where heads are interleaved. Rows are those of the query tile there, as a warp counts
// them (see first_row_of), and not those of the sequence.
template <class OwnTiles>
struct TilesByRow {
  RowsOfHeads<Visible, kHeadsPerTile> visible;
  const OwnTiles& tiles;

  DEVICE TilesByRow(const OwnTiles& tiles, int first_query)
      : visible{tiles.visible, first_query, tiles.visible.sink}, tiles(tiles) {}
  DEVICE int first_key(int n) const { return tiles.first_key(n); }
  DEVICE Edges edges(int n) const { return tiles.edges(n); }
};
DEVICE void to_operands(M::A (&p)[kKeyBlocks], const C (&scores)[1][kKeyBlocks]) {
  UNROLL for (int n = 0; n < kKeyBlocks; n++) p[n] = M::from_accumulator(scores[0][n]);
}

// Factor of a head's output: 1 / (1 - dropout_p) under dropout, times the scale of values in float8.
DEVICE float output_factor(const ForwardParams& p, int head) {
  const float kept = kDropout ? p.dropout.factor : 1.0f;
  return kFloat8 ? kept * value_factor(p, head) : kept;
}

// What the softmax multiplies scores by to get exponents. scale: of Q K^T products. It is left out where scores are
// scaled before they come to the softmax.
DEVICE float softmax_scale(float scale) {
  return kScaleFirst || ScoreRule::kGivesScaledScores ? Exponent::kUnit : scale * Exponent::kUnit;
}

DEVICE void consume(const Sm90ForwardParams& params, const Maps& maps, SharedMemory& s, int index) {
  const ForwardParams& p = params.forward;
  Consumer self(s, index);
  const float scale_log2 = softmax_scale(p.scores.scale);
  Ring<2> slot;
  Ring<kQuerySlots> queries;
  if (kPingPong && index == kConsumers - 1) self.pass_turn();  // the first turn is consumer 0's
  for (;;) {
    ptx::mbarrier_wait(&s.work_full[slot.slot], slot.parity);
    const Item& work = s.work[slot.slot];  // stays there until this tile is stored
    if (!work.exists) break;
    const Keys key_tiles = key_tiles_of(p, work);
    const TileSpan span = span_of_item(key_tiles, work);
    // Through a shuffle: what follows from it lies in uniform registers then.
    if constexpr (kSharesKeys) self.stride = target::wave_uniform(shares_keys(work, span) ? kConsumers : 1);
    const bool shares = kSharesKeys && self.stride > 1;
    const int tile_first = shares ? 0 : index * 64;  // the first of this consumer's 64 rows of the tile
    // [first, last]: the query rows that these rows belong to.
    constexpr int kRows = Rows::kQueryRowsOfConsumer;
    const int first = first_query(work) + (kRows == kTileQ ? 0 : tile_row(tile_first).row);
    const int last = last_query(work, first);
    const TileRow own = tile_row(tile_first + self.warp * 16);
    const int first_row = first_row_of(work, tile_first + self.warp * 16, own);
    const auto own_tiles = key_tiles.of_rows<kRows>(first, last);
    const TileSpan mine = shares ? span : kept_of_item(seen_of_item(own_tiles, key_tiles, span), work);

    const int head = work.head + own.head;
    ScoreRule rule(p, work.sequence, head, work.q.length, work.k.length, own_tiles.visible.offset);
    if constexpr (kConvertsQueries) {
      if (has_tiles(span)) {
        ptx::mbarrier_wait(&s.queries_full[queries.slot], queries.parity);
        rule.key_factor *= convert_queries(s, index);
      }
    }
    const DropoutRule dropout(p, work.sequence, head);

    Softmax softmax(kFloat8 ? softmax_scale(rule.scale()) : scale_log2);
    C o[1][kOutBlocks];
    M::A probabilities[kKeyBlocks];
    AddedScores<C, 1, kKeyBlocks, kRamp> added;
    added.lines_by_step = added.can_step_lines(rule, first_row, self.lane);
    self.slopes.begin(rule, added.lines_by_step, first_row, self.warp, self.lane);
    MaskOfTile<kKeyMask> mask;
    RowsPastEnd<kPageRows> past_end;
    RandomWords random;
    self.bias.begin(s, p.bias, work, own, first_row, self.lane);
    // Loads or generates what tile n needs beside its products, while those run: bias, mask bits, random bits of
    // dropout (sm90/forward_random.cuh).
    const auto prepare = [&](int n) {
      added.tile_beyond_diagonal = is_beyond(own_tiles, n);
      if constexpr (kBiasInSlots) {
        self.bias.read(added, s, self.lane);
        added.load_distances(rule, first_row, own_tiles.first_key(n), self.lane);
      } else {
        added.load(rule, first_row, own_tiles.first_key(n), self.lane);
      }
      mask.load(p, work, head, own_tiles, n, first_row, self.lane);
      past_end.load(own_tiles.first_key(n), work.k.length);
      random.beside_output(dropout, first_row, own_tiles.first_key(n), self.lane);
    };
    // Masks the scores of tile n and updates the running maxima. Returns whether the output must be rescaled.
    const auto finish = [&](C(&scores)[1][kKeyBlocks], int n) {
      const SoftmaxScore<kScaleFirst> score{rule.scale()};
      fold_ramp(scores, rule, own_tiles, n, first_row, self.lane);
      const auto finish_by = [&](const auto& tiles) {
        finish_scores(scores, rule, added, score, tiles, n, first_row, self.lane);
      };
      if constexpr (kInterleaved) {
        finish_by(TilesByRow(own_tiles, first_query(work)));
      } else {
        finish_by(own_tiles);
      }
      mask.hide(scores, self.lane, added.bias_clearer());
      return softmax.update_row_max(scores, added);
    };
    const auto exponentiate = [&](C(&scores)[1][kKeyBlocks]) {
      softmax.exponentiate(scores, added);
      random.drop(scores, dropout, self.lane);
      to_operands(probabilities, scores);
    };

    const unsigned long long q =
        Consumer::of_slot<kQueryBytes>(ptx::wgmma_descriptor(s.queries[0] + tile_first * 128, 0), queries.slot);
    const auto leave_queries = [&] {
      self.release(&s.queries_empty[queries.slot]);
      queries.advance();
    };
    UNROLL for (int d = 0; d < kOutBlocks; d++) o[0][d] = C{};
    if (has_tiles(span)) ptx::mbarrier_wait(&s.queries_full[queries.slot], queries.parity);
#pragma unroll 1
    for (int n = span.begin; n < mine.begin; n++) self.skip_tile();
    int n = mine.begin;
    unsigned taken = 0;  // as of take_number()
    if (shares) {
      self.begin_shared();
      n += index;
    }
    if (n < mine.end) {
      {
        C scores[1][kKeyBlocks];
        self.wait_for_keys();
        self.take_turn();
        self.start_scores(scores, q, is_beyond(own_tiles, n));
        report_before(params, work);
        random.beside_scores(dropout, first_row, own_tiles.first_key(n), self.lane);
        prepare(n);
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(scores[0]);
        self.pass_turn();
        self.release_keys();
        finish(scores, n);
        random.beside_exponentials(dropout, first_row, own_tiles.first_key(n), self.lane);
        exponentiate(scores);
      }
#pragma unroll 1
      for (n += self.stride; n < mine.end; n += self.stride) {
        C scores[1][kKeyBlocks];
        self.wait_for_keys();
        self.take_turn();
        self.start_scores(scores, q, is_beyond(own_tiles, n));
        random.beside_scores(dropout, first_row, own_tiles.first_key(n), self.lane);
        self.wait_for_values();
        mask.clear(s, self.values.slot, index);
        // In ascending order the sequence ends in the last tile, whose values are cleared after this loop.
        if constexpr (key_tile_order<Visible>() != TileOrder::kUp) past_end.clear(s, self.values.slot, self.lane);
        self.start_output(o, probabilities);
        prepare(n);
        ptx::wgmma_wait<1>();
        ptx::wgmma_results(scores[0]);
        // The turn is passed only now that the scores are there: the next consumer's products would delay them.
        self.pass_turn();
        self.release_keys();
        const bool moved = finish(scores, n);
        // P V is waited for here and not after the exponentials. It holds the registers that probabilities are
        // converted into, and exponentials mixed with those conversions are faster than exponentials beside P V and
        // conversions after it.
        ptx::wgmma_wait<0>();
        random.beside_exponentials(dropout, first_row, own_tiles.first_key(n), self.lane);
        self.release_values();
        exponentiate(scores);
        if (moved) softmax.rescale(o);
      }
      if (!shares) leave_queries();
      taken = take_number(params, work);
      self.wait_for_values();
      mask.clear(s, self.values.slot, index);
      past_end.clear(s, self.values.slot, self.lane);
      self.start_output(o, probabilities);
      ptx::wgmma_wait<0>();
      self.release_values();
      softmax.sum_rows();
    } else {
      report_before(params, work);
      if (has_tiles(span)) {
        target::wave_sync();
        leave_queries();
      }
    }
    if (shares) {
      self.end_shared(n - span.end);
      merge_consumers(s.queries[queries.slot], index, self.warp, self.lane, o, softmax);
      leave_queries();
    } else {
#pragma unroll 1
      for (n = mine.end; n < span.end; n++) self.skip_tile();
      if (mine.begin >= mine.end) taken = take_number(params, work);
    }
    bool nan = false;  // whether the lane's part of the stored output may have one
    if (is_whole(work) ? !shares || index == 0 : leave_or_merge(params, work, taken, o, softmax)) {
      if constexpr (kSinkLogits) {
        softmax.add_sink(per_head(p.sink_logits, work.sequence, head) * Exponent::kUnit);
        softmax.rescale(o);
      }
      softmax.divide(o, output_factor(p, head));
      store<kTensorStores>(params, maps, s, work, o, softmax, head, first_row, self.lane);
      nan = has_hidden_nan(o);
    }
    if (kHidesFromSome && target::wave_any(nan)) rewrite_nan(p, work);
    // Every thread arrives, since each of them has read the work slot up to here.
    ptx::mbarrier_arrive(&s.work_empty[slot.slot]);
    slot.advance();
  }
  // TMA may still be reading the output from this block's shared memory.
  if constexpr (kTensorStores) ptx::wait_stores_read();
}

// Makes the barriers of a block, and prefetches the tensor maps. One thread calls it.
DEVICE void prepare(const Maps& maps, SharedMemory& shared) {
  for (int i = 0; i < kStages; i++) {
    ptx::mbarrier_init(&shared.keys_full[i], kCopiesRows && !kFloat8 ? kLoadWarps * target::kWave : 1);
    ptx::mbarrier_init(&shared.keys_empty[i], 4 * kConsumers * kCluster);
    ptx::mbarrier_init(&shared.values_full[i], kCopiesRows || kFloat8 ? kLoadWarps * target::kWave : 1);
    ptx::mbarrier_init(&shared.values_empty[i], kFloat8 ? kWarpgroup * kConsumers : 4 * kConsumers * kCluster);
  }
  for (int i = 0; i < 2; i++) {
    ptx::mbarrier_init(&shared.work_full[i], kKeyMask ? target::kWave : 1);
    if constexpr (kKeyMask) ptx::mbarrier_init(&shared.work_found[i], 1);
    ptx::mbarrier_init(&shared.work_empty[i], kWarpgroup * kConsumers + kWorkReadingWarps);
  }
  for (int i = 0; i < (kBiasInSlots ? kBiasSlots : 0); i++) {
    ptx::mbarrier_init(&shared.bias_full[i], kBiasByRows ? kBiasWarps * target::kWave : 1);
    ptx::mbarrier_init(&shared.bias_empty[i], 4 * kConsumers);
  }
  init_stored_barriers(shared);
  for (int i = 0; i < kQuerySlots; i++) {
    ptx::mbarrier_init(&shared.queries_full[i], 1);
    ptx::mbarrier_init(&shared.queries_empty[i], 4 * kConsumers);
  }
  Tickets<kCluster>::init(shared.tickets);
  ptx::fence_mbarrier_init();
  ptx::prefetch_tensormap(&maps.q);
  maps.prefetch();
  if constexpr (kBiasInBoxes) prefetch_bias_map(maps);
}

}  // namespace forward

KERNEL CLUSTER(forward::kCluster)
    LAUNCH_BOUNDS(forward::kThreads, config::kBlocksPerSm) void rawattn_sm90_forward(PARAMETER forward::Params p,
                                                                                     PARAMETER forward::Maps maps) {
  using namespace forward;
  SHARED_MEMORY_ALIGNED(bytes, sizeof(SharedMemory), 1024);
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(bytes);
  if constexpr (kInterleaved) {
    for (auto& queries : shared.queries) clear_last_rows(queries, target::thread_index(), kThreads);
  }
  Slopes<kRamp>::write_keys(shared);
  target::launch_dependents();
  // What else is to be done before the first loads is left to other warps, since to find work takes longest.
  if (target::thread_index() < target::kWave) {
    find_first_work(p, shared, target::thread_index());
  } else {
    if (target::thread_index() == kThreads - 1) prepare(maps, shared);
    if constexpr (kPaged) {
      constexpr int kOthers = kThreads - target::kWave;
      const int64 thread = int64(target::block_index()) * kOthers + target::thread_index() - target::kWave;
      prefetch_pages(p.forward.pages, p.forward.k_side.length, p.forward.batch, thread);
    }
    target::wait_for_prior_kernels();
  }
  if constexpr (kCluster == 1) {
    target::block_sync();
  } else {
    ptx::cluster_sync();
  }
  // The shuffle tells the compiler that the warpgroup is the same for a whole warp: then it keeps descriptors in
  // uniform registers.
  const int warpgroup = target::wave_uniform(target::thread_index() / kWarpgroup);
  if (warpgroup == 0) {
    if constexpr (kSharesRegisters) ptx::setmaxnreg_dec<kProducerRegisters>();
    const int lane = target::thread_index() % target::kWave;
    const int warp = target::wave_uniform(target::thread_index() / target::kWave);
    if (warp == 0 && lane < kProducerLanes) produce(p, maps, shared, lane);
    if constexpr (kValuesApart) {
      if (warp % 2 == 1 && warp / 2 < kLoadWarps) produce_part<false>(p, maps, shared, warp / 2, lane);
      if (warp == 2 && kLoadWarps > 1) produce_part<true>(p, maps, shared, 1, lane);
    }
    if constexpr (kKeyMask) {
      if (warp == 1) read_key_masks(p, shared, lane);
    }
    if constexpr (kBiasByRows) {
      if (warp >= kFirstBiasWarp) produce_bias_rows(p.forward, shared, (warp - kFirstBiasWarp) * target::kWave + lane);
    }
    if constexpr (kFloat8) {
      if (warp == 2) convert<true>(p, shared, lane);
      if (warp == 3) convert<false>(p, shared, lane);
    }
  } else {
    if constexpr (kSharesRegisters) ptx::setmaxnreg_inc<kConsumerRegisters>();
    // Consumers fill padding rows of the outputs while the first queries and keys are being loaded.
    if constexpr (kRagged) {
      constexpr int kWaves = 4 * kConsumers;
      const int wave = target::thread_index() / target::kWave - 4;
      fill_padding(p.padding, p.resolve(p.padding.side), target::block_index() * kWaves + wave,
                   target::grid_size() * kWaves);
    }
    consume(p, maps, shared, warpgroup - 1);
  }
  // Other blocks of the cluster may still arrive at barriers of this block.
  if constexpr (kCluster > 1) ptx::cluster_sync();
}
