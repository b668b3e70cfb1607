// Attention forward for Hopper: persistent blocks, TMA loads, wgmma products (FlashAttention-3, Shah et al. 2024).
//
// Warpgroup 0 produces: one thread walks the schedule and keeps TMA ahead of the consumers. Each of the
// kConsumers other warpgroups owns 64 query rows. In a consumer, P V of tile n - 1 runs in the tensor cores while the
// scores of tile n are finished and looked through for new row maxima; its exponentials meet the products of other
// consumers. With kPingPong consumers take turns at issuing products, so that they do not all want the same unit at
// once. The next tile's queries, keys and values travel while this one's output is stored.
//
// Blocks of a cluster (kCluster > 1) work on neighbouring query tiles at the same time, and load keys and values for
// each other: half of what a block needs is read from L2 by its neighbour.
//
// With kStreamK the last tiles, too few for all blocks, are split by keys (stream-K), and what becomes of them is
// merged.
#include "attn/added_scores.cuh"
#include "attn/exponent.cuh"
#include "attn/fill_padding.cuh"
#include "attn/mask_bits.cuh"
#include "attn/score_rule.cuh"
#include "attn/scores.cuh"
#include "sm90/forward_bias.cuh"
#include "sm90/forward_bias_rows.cuh"
#include "sm90/forward_block.cuh"
#include "sm90/forward_float8.cuh"
#include "sm90/forward_key_mask.cuh"
#include "sm90/forward_merge.cuh"
#include "sm90/forward_page_rows.cuh"
#include "sm90/forward_pages.cuh"
#include "sm90/forward_producer.cuh"
#include "sm90/forward_ramp.cuh"
#include "sm90/forward_random.cuh"
#include "sm90/forward_store.cuh"
#include "sm90/hidden_values.cuh"

namespace forward {

struct Consumer {
  SharedMemory& s;
  const int index, lane, warp;                        // warp: 0 to 3 in the warpgroup
  const unsigned long long first_keys, first_values;  // descriptors of the rings' first slots
  const unsigned shared;                              // the address of s
  Ring<kStages> keys, values;
  OwnBias bias;
  Slopes<kRamp> slopes;

  DEVICE Consumer(SharedMemory& s, int index)
      : s(s),
        index(index),
        lane(target::thread_index() % 32),
        warp(target::thread_index() / 32 % 4),
        first_keys(make_uniform_descriptor(s.keys[0], 0, kNextKeys)),
        first_values(make_uniform_descriptor(s.values[0], kNextBlock, kNextValues)),
        shared(make_uniform(target::shared_address(&s))),
        bias(s, tile_row(index * 64 + warp * 16), lane),
        slopes(s.boxes, index) {}

  DEVICE void take_turn() const {
    if constexpr (kPingPong) ptx::barrier_sync(kTurn + index, 2 * kWarpgroup);
  }
  DEVICE void pass_turn() const {
    if constexpr (kPingPong) ptx::barrier_arrive(kTurn + (index + 1 == kConsumers ? 0 : index + 1), 2 * kWarpgroup);
  }

  // In 32 bits: of a pointer to the slot the compiler would compute all 64.
  template <int kSlotBytes>
  DEVICE static unsigned long long of_slot(unsigned long long first, int slot) {
    return first + static_cast<unsigned>(slot * (kSlotBytes / 16));
  }
  // The keys' two barriers share a register. The values' must not: the compiler would take one of a descriptor that
  // products under way still read.
  static constexpr int kKeysFull = sizeof(Tiles), kKeysEmpty = kKeysFull + sizeof(s.keys_full);
  DEVICE unsigned keys_barriers() const { return shared + keys.slot * static_cast<int>(sizeof(ptx::Mbarrier)); }
  DEVICE void wait_for_keys() const {
    ptx::mbarrier_wait<kKeysFull>(keys_barriers(), keys.parity);
    see_copies();
  }
  DEVICE void wait_for_values() const {
    ptx::mbarrier_wait(&s.values_full[values.slot], values.parity);
    see_copies();
  }
  // Products read what lanes have copied: whoever converts tiles of 8 bits has seen to it.
  DEVICE static void see_copies() {
    if constexpr (kCopiesRows && !kFloat8) ptx::fence_copies();
  }

  // S = Q K^T of the tile in the ring's slot, under way when this returns. beyond: of a ramp, the diagonal.
  DEVICE void start_scores(C (&scores)[1][kKeyBlocks], unsigned long long q, bool beyond) const {
    const unsigned long long k = of_slot<kKeyBytes>(first_keys, keys.slot);
    ptx::wgmma_fence();
    UNROLL for (int step = 0; step < kDepthQk / 16; step++) {
      Qk::ss<ptx::Major::K, ptx::Major::K>(scores[0], q + step / 4 * (kTileRows * 8) + step % 4 * 2,
                                           k + step / 4 * (kNextBlock / 16) + step % 4 * 2, step > 0);
    }
    slopes.add(scores[0], beyond);
    ptx::wgmma_commit();
  }
  // O += P V of the tile in the ring's slot, under way when this returns.
  DEVICE void start_output(C (&o)[1][kOutBlocks], const M::A (&p)[kKeyBlocks]) const {
    const unsigned long long v = of_slot<kValueBytes>(first_values, values.slot);
    ptx::wgmma_fence();
    UNROLL for (int step = 0; step < kKeyBlocks; step++) {
      Pv::rs<ptx::Major::MN>(o[0], p[step], v + step * (2 * kNextValues / 16));
    }
    ptx::wgmma_commit();
  }
  DEVICE void release(ptx::Mbarrier* barrier) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
  // Slots of keys and values all blocks of the cluster wait for before they load anew.
  DEVICE void release_keys() {
    if constexpr (kCluster == 1) {
      if (lane == 0) ptx::mbarrier_arrive<kKeysEmpty>(keys_barriers());
    } else {
      if (lane < kCluster) ptx::mbarrier_arrive_at(&s.keys_empty[keys.slot], lane);
    }
    keys.advance();
  }
  DEVICE void release_values() {
    if constexpr (kFloat8) {
      ptx::mbarrier_arrive(&s.values_empty[values.slot]);  // every lane for itself: it may have cleared rows
    } else if constexpr (kCluster == 1) {
      release(&s.values_empty[values.slot]);
    } else {
      if (lane < kCluster) ptx::mbarrier_arrive_at(&s.values_empty[values.slot], lane);
    }
    values.advance();
  }
  // A tile that other consumers work on and this one's rows do not see. Its slots may be given back only once they are
  // full, and every lane knows it: an earlier arrival would count for the slots' last tile, and hide this one from a
  // lane that still waits. (Where a tile is worked on, the products bring the lanes together.)
  DEVICE void skip_tile() {
    wait_for_keys();
    take_turn();
    pass_turn();
    target::wave_sync();
    release_keys();
    if constexpr (kBiasInSlots) bias.skip(s, lane);
    wait_for_values();
    target::wave_sync();
    release_values();
  }
};

// Of a consumer's query rows the last one, from its first.
DEVICE int last_query(const WorkTile& work, int first) {
  int behind = first + Rows::kOfConsumer;
  if constexpr (kInterleaved) {
    const int behind_tile = first_query(work) + kTileQ;
    if (behind_tile < behind) behind = behind_tile;
  }
  return (behind < work.q.length ? behind : work.q.length) - 1;
}

// Key tiles for rows as a warp counts them: see first_row_of.
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

// What the output of a head is multiplied by: dropout keeps some of the probabilities, and values may have a scale.
DEVICE float output_factor(const ForwardParams& p, int head) {
  const float kept = kDropout ? p.dropout.factor : 1.0f;
  return kFloat8 ? kept * value_factor(p, head) : kept;
}

// From products to units of the exponent, where nothing else scales them. scale: of products.
DEVICE float softmax_scale(float scale) {
  return kScaleFirst || ScoreRule::kScaled ? Exponent::kUnit : scale * Exponent::kUnit;
}

DEVICE void consume(const Sm90ForwardParams& params, const Maps& maps, SharedMemory& s, int index) {
  const ForwardParams& p = params.forward;
  Consumer self(s, index);
  const unsigned long long first_queries = ptx::wgmma_descriptor(s.queries[0] + index * 64 * 128, 0);
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
    // The query rows that this consumer's 64 lie among.
    constexpr int kRows = Rows::kOfConsumer;
    const int first = first_query(work) + (kRows == kTileQ ? 0 : tile_row(index * 64).row);
    const int last = last_query(work, first);
    const TileRow own = tile_row(index * 64 + self.warp * 16);
    const int first_row = first_row_of(work, index * 64 + self.warp * 16, own);
    const auto own_tiles = key_tiles.of_rows<kRows>(first, last);
    const TileSpan mine = kept_of_item(seen_of_item(own_tiles, key_tiles, span), work);

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
    added.straight = added.are_straight(rule, first_row, self.lane);
    self.slopes.begin(rule, added.straight, first_row, self.warp, self.lane);
    MaskOfTile<kKeyMask> mask;
    RowsPastEnd<kPageRows> past_end;
    RandomWords random;
    self.bias.begin(s, p.bias, work, own, first_row, self.lane);
    // What a tile needs beside its products, while those are under way.
    const auto prepare = [&](int n) {
      added.beyond = is_beyond(own_tiles, n);
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
    // Returns whether the output must be rescaled.
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
      mask.hide(scores, self.lane, added.forgets());
      return softmax.update_row_max(scores, added);
    };
    const auto exponentiate = [&](C(&scores)[1][kKeyBlocks]) {
      softmax.exponentiate(scores, added);
      random.drop(scores, dropout, self.lane);
      to_operands(probabilities, scores);
    };

    const unsigned long long q = Consumer::of_slot<kQueryBytes>(first_queries, queries.slot);
    UNROLL for (int d = 0; d < kOutBlocks; d++) o[0][d] = C{};
    if (has_tiles(span)) ptx::mbarrier_wait(&s.queries_full[queries.slot], queries.parity);
#pragma unroll 1
    for (int n = span.begin; n < mine.begin; n++) self.skip_tile();
    if (mine.begin < mine.end) {
      {
        C scores[1][kKeyBlocks];
        self.wait_for_keys();
        self.take_turn();
        self.start_scores(scores, q, is_beyond(own_tiles, mine.begin));
        random.beside_scores(dropout, first_row, own_tiles.first_key(mine.begin), self.lane);
        prepare(mine.begin);
        ptx::wgmma_wait<0>();
        ptx::wgmma_results(scores[0]);
        self.pass_turn();
        self.release_keys();
        finish(scores, mine.begin);
        random.beside_exponentials(dropout, first_row, own_tiles.first_key(mine.begin), self.lane);
        exponentiate(scores);
      }
#pragma unroll 1
      for (int n = mine.begin + 1; n < mine.end; n++) {
        C scores[1][kKeyBlocks];
        self.wait_for_keys();
        self.take_turn();
        self.start_scores(scores, q, is_beyond(own_tiles, n));
        random.beside_scores(dropout, first_row, own_tiles.first_key(n), self.lane);
        self.wait_for_values();
        mask.clear(s, self.values.slot, index);
        // In ascending order the sequence's end is in the last tile.
        if constexpr (order_of_keys<Visible>() != TileOrder::kUp) past_end.clear(s, self.values.slot, index);
        self.start_output(o, probabilities);
        prepare(n);
        ptx::wgmma_wait<1>();
        ptx::wgmma_results(scores[0]);
        // Not before the scores are there: products of the next consumer would delay them.
        self.pass_turn();
        self.release_keys();
        const bool moved = finish(scores, n);
        // P V ends here, not below the exponentials: those are faster in one stretch with the conversions, whose
        // registers P V holds, than apart from them under P V.
        ptx::wgmma_wait<0>();
        random.beside_exponentials(dropout, first_row, own_tiles.first_key(n), self.lane);
        self.release_values();
        exponentiate(scores);
        if (moved) softmax.rescale(o);
      }
      self.release(&s.queries_empty[queries.slot]);
      queries.advance();
      self.wait_for_values();
      mask.clear(s, self.values.slot, index);
      past_end.clear(s, self.values.slot, index);
      self.start_output(o, probabilities);
      ptx::wgmma_wait<0>();
      self.release_values();
      softmax.sum_rows();
    } else if (has_tiles(span)) {
      target::wave_sync();
      self.release(&s.queries_empty[queries.slot]);
      queries.advance();
    }
#pragma unroll 1
    for (int n = mine.end; n < span.end; n++) self.skip_tile();
    if (is_whole(work)) {
      if constexpr (kSinkLogits) {
        softmax.add_sink(per_head(p.sink_logits, work.sequence, head) * Exponent::kUnit);
        softmax.rescale(o);
      }
      softmax.divide(o, output_factor(p, head));
      store<kTensorStores>(params, maps, s, work, o, softmax, head, first_row, self.lane);
    } else {
      softmax.divide(o, output_factor(p, head));
      store_partial(params, work, o, softmax);
    }
    // Every thread for itself: all of them read the slot, up to here.
    ptx::mbarrier_arrive(&s.work_empty[slot.slot]);
    slot.advance();
  }
  // The engine still reads this block's memory.
  if constexpr (kTensorStores) ptx::wait_stores_read();
}

// Rows of queries that are nobody's are no numbers of others either: no copy writes there. All threads come here, and a
// barrier behind it.
DEVICE void clear_last_rows(SharedMemory& s) {
  constexpr int kEach = (kTileRows - kTileQ * kHeadsPerTile) * 128 / 16;  // pieces of a block of columns
  for (int n = target::thread_index(); n < kQuerySlots * kBlocksQk * kEach; n += kThreads) {
    unsigned char* const block = s.queries[0] + n / kEach * (kTileRows * 128);
    reinterpret_cast<Chunk<16>*>(block + kTileQ * kHeadsPerTile * 128)[n % kEach] = Chunk<16>{};
  }
  ptx::fence_copies();
}

}  // namespace forward

KERNEL CLUSTER(forward::kCluster)
    LAUNCH_BOUNDS(forward::kThreads, config::kBlocksPerSm) void rawattn_sm90_forward(PARAMETER forward::Params p,
                                                                                     PARAMETER forward::Maps maps) {
  using namespace forward;
  SHARED_MEMORY_ALIGNED(bytes, sizeof(SharedMemory), 1024);
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(bytes);
  if (target::thread_index() == 0) {
    for (int i = 0; i < kStages; i++) {
      ptx::mbarrier_init(&shared.keys_full[i], kCopiesRows && !kFloat8 ? kRowWarps * target::kWave : 1);
      ptx::mbarrier_init(&shared.keys_empty[i], 4 * kConsumers * kCluster);
      ptx::mbarrier_init(&shared.values_full[i], kCopiesRows || kFloat8 ? kRowWarps * target::kWave : 1);
      ptx::mbarrier_init(&shared.values_empty[i], kFloat8 ? kWarpgroup * kConsumers : 4 * kConsumers * kCluster);
    }
    for (int i = 0; i < 2; i++) {
      ptx::mbarrier_init(&shared.work_full[i], 1);
      if constexpr (kKeyMask) ptx::mbarrier_init(&shared.work_found[i], 1);
      ptx::mbarrier_init(&shared.work_empty[i], kWarpgroup * kConsumers + kHelpers);
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
  if constexpr (kInterleaved) clear_last_rows(shared);
  Slopes<kRamp>::write_keys(shared.boxes);
  target::launch_dependents();
  target::wait_for_prerequisites();
  shared.own_order.find(p, shared.queries[0]);
  if constexpr (kCluster == 1) {
    target::block_sync();
  } else {
    ptx::cluster_sync();
  }
  // The compiler, once it knows that the warpgroup is the same for the whole warp, keeps descriptors in uniform
  // registers.
  const int warpgroup = target::wave_uniform(target::thread_index() / kWarpgroup);
  if (warpgroup == 0) {
    if constexpr (kSharesRegisters) ptx::setmaxnreg_dec<kProducerRegisters>();
    const int lane = target::thread_index() % target::kWave;
    const int warp = target::wave_uniform(target::thread_index() / target::kWave);
    if (warp == 0 && lane < kProducerLanes) produce(p, maps, shared, lane);
    if constexpr (kValuesApart) {
      if (warp % 2 == 1 && warp / 2 < kRowWarps) produce_part<false>(p, maps, shared, warp / 2, lane);
      if (warp == 2 && kRowWarps > 1) produce_part<true>(p, maps, shared, 1, lane);
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
    // While the first queries and keys are on their way.
    if constexpr (kRagged) {
      constexpr int kWaves = 4 * kConsumers;
      const int wave = target::thread_index() / target::kWave - 4;
      fill_padding(p.padding, p.found(p.padding.side), target::block_index() * kWaves + wave,
                   target::grid_size() * kWaves);
    }
    consume(p, maps, shared, warpgroup - 1);
  }
  // Neighbours may still give slots back to this block.
  if constexpr (kCluster > 1) ptx::cluster_sync();
}
