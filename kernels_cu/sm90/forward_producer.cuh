// The producer of a Hopper forward block (sm90/forward.cu): it walks the schedule, tells all warps of the block which
// work comes next, and keeps loads of queries, keys and values ahead of the consumers.
//
// It is one thread that issues TMA loads. Where keys are in pages it is two warps, one for keys and one for values,
// since a single warp would issue boxes no faster than the products consume them. Each lane finds the page of a box and
// issues the load of that box (sm90/forward_pages.cuh). Where pages must be copied row by row, two or four warps do so
// (sm90/forward_page_rows.cuh).
#pragma once

#include "sm90/forward_bias.cuh"
#include "sm90/forward_float8.cuh"
#include "sm90/forward_key_mask.cuh"
#include "sm90/forward_page_rows.cuh"
#include "sm90/forward_pages.cuh"
#include "sm90/forward_shared_keys.cuh"
#include "sm90/forward_work.cuh"

namespace forward {

// When the next work is found. Under a block mask a block begins query tiles often, and to find one it reads the order
// of tiles and a list of key tiles from memory. So the producer takes a ticket when kTilesLeft key tiles of the current
// work are left to load, and finds the ticket's work with the last of them. Without a mask, and where tiles are split
// by keys, it takes the ticket once the last keys are loaded, so that work goes to the block that is done first.
constexpr bool kFindsEarly = kBlockMask && !kStreamK;
constexpr int kTilesLeft = 3;

// Whether queries are asked for before keys where their slot is empty: in a block's first work, and in a further item
// of a piece. In pages the first keys are asked for later, since their pages have to be looked up.
constexpr bool kAsksAtOnce = kValuesApart && kQuerySlots == 1;

// Rounds of tiles that the last sections of a ragged batch have, where tiles are unlike and no keys split them.
constexpr int kLastRounds = kRagged && kRight && !kStreamK && !kPaged ? 2 : 0;

// Blocks, or clusters of them, that take work at the same time.
DEVICE unsigned workers() { return static_cast<unsigned>(target::grid_size()) / kCluster; }

DEVICE void clamp_to_pages(WorkTile& work, const Sm90ForwardParams& p) {
  if constexpr (kPaged) work.k.length = length_in_pages(p.forward.pages, work.sequence, work.k.length);
}
// Finds the work at an index of the schedule. apart: as of find_work_tile().
template <class Order>
DEVICE void find(WorkTile& work, const Sm90ForwardParams& p, const Order& order, int64 index, int apart) {
  const int last_tiles = kLastRounds * static_cast<int>(target::grid_size()) / kCluster;
  work = find_work_tile<kRagged, kRight, kClusterQ, kHeadsPerTile>(p.forward, order, index, p.kept_tiles, last_tiles,
                                                                   apart);
  if constexpr (kBlockMask) {
    if (work.exists && p.forward.block_mask.lists.order != nullptr) {
      const int last = (work.q.length - 1) / kClusterQ;
      const int rank = kRight ? last - work.tile : work.tile;
      const int tile = *order_of<kClusterQ>(p.forward.block_mask.lists, work.sequence, work.q, rank, work.head);
      // Lengths on the device are unchecked and may lay sequences over each other. Then this entry may be another
      // sequence's, so it is clamped.
      work.tile = tile < last ? tile : last;
    }
  }
  if (work.exists) clamp_to_pages(work, p);
}
template <class Order>
DEVICE void find(WorkTile& work, const Sm90ForwardParams& p, const Order& order, const StreamLine&, int64 index, int) {
  find(work, p, order, index, 0);
}
// The query tiles that are split by keys: attn/schedule/stream_k.cuh. Of a ragged batch the line is still to be cut,
// unless it weighs last tiles.
DEVICE StreamLine find_line(const Sm90ForwardParams& p, const SeenOrder& order, int lane) {
  if constexpr (kRagged) {
    const auto key_tiles_at_end = [&](bool longest) {
      WorkTile work = find_end<kRagged, kRight, kClusterQ>(p.forward, order, longest);
      clamp_to_pages(work, p);
      return key_tiles_of(p.forward, work).count();
    };
    const int busy = p.stream_k.busy_consumers;
    const bool weighs =
        p.stream_k.last_share > 0 && (busy == 0 || order.seen->have_rows_for(busy, p.forward.batch, lane));
    return StreamLine::of_ragged<kClusterQ, kHeadsPerTile>(p.forward, order, p.stream_k, weighs, workers(), lane,
                                                           key_tiles_at_end);
  } else {
    return StreamLine::of_dense<kClusterQ, kHeadsPerTile>(p.forward, p.stream_k);
  }
}
// Key tiles of the first query tile of a ragged batch: without a mask, the longest tile of the first sequence of the
// order that has any.
template <bool kUsed>
DEVICE int key_tiles_of_first(const Sm90ForwardParams& p, const OrderOfBlock<kUsed, true>& order) {
  if constexpr (kUsed) {
    WorkTile work;
    find_position<kUsed>(p.forward, order, order.position(p.forward.batch, 0), work);
    work.head = 0;
    work.tile = kRight ? (work.q.length + kClusterQ - 1) / kClusterQ - 1 : 0;
    clamp_to_pages(work, p);
    return key_tiles_of(p.forward, work).count();
  }
  return 0;
}
template <class Order>
DEVICE void find(WorkItem& work, const Sm90ForwardParams& p, const Order& order, const StreamLine& line, int64 index,
                 int rest_end) {
  if (kUnequalTiles && p.stream_k.rows > 0) {
    const UnequalTilesLine<kClusterQ, kHeadsPerTile> unequal{p.forward, p.stream_k};
    unequal.find(work, index, rest_end, [&](const WorkTile& tile) {
      const int count = key_tiles_of(p.forward, tile).count();
      return count > 0 ? count : 1;
    });
  } else {
    index = line.find(work, index, rest_end);
    ptx::compiler_fence();
    find(static_cast<WorkTile&>(work), p, order, index, line.apart);
  }
  if (!work.exists) return;
  const TileSpan all = key_tiles_of(p.forward, work);
  work.keys = work.whole ? all : part_of(all, work.keys.begin, work.keys.end, work.units);
}
// The end of the rest of this piece in the stream-K line; negative if there is none.
DEVICE int rest_end_of(const WorkItem& work) { return work.rest_end; }
DEVICE int rest_end_of(const WorkTile&) { return -1; }
// Tells an item that follows `before` in its piece, or a piece's first item (null), where it comes from.
DEVICE void set_origin(WorkItem& work, const WorkItem* before) {
  work.comes_from = before != nullptr && !before->whole ? before->split_index : -1;
}
DEVICE void set_origin(WorkTile&, const WorkTile*) {}

// kByLength: by the sequence's length alone; else a mask of keys, which must have been read, counts too.
template <bool kByLength>
DEVICE Keys key_tiles_to_load(const ForwardParams& p, const Item& work) {
  if constexpr (kByLength) return key_tiles_of(p, static_cast<const WorkTile&>(work));
  return key_tiles_of(p, work);
}

DEVICE void produce(const Params& p, const Maps& maps, SharedMemory& s, int lane) {
  const bool leads = kProducerLanes == 1 || lane == 0;
  auto& barriers = Landing::barriers(s);
  const KeyArray array_k = array_of_keys(p, maps), array_v = array_of_values(p, maps);
  Ring<Landing::kSlots> keys, values;
  Ring<kBiasSlots> bias;
  Ring<2> slot;
  Tickets<kCluster> tickets(p.next_work, s.tickets);
  Ring<kQuerySlots> queries;
  int64 index = target::block_index() / kCluster;
  int rest_end = -1;  // where the ticket's next item ends in the stream-K line; negative: its first item is next
  const auto tell = [&] { ptx::mbarrier_arrive(&(kKeyMask ? s.work_found : s.work_full)[slot.slot]); };
  // Finds the next work, writes it to the next slot, and signals the warps that wait for it.
  const auto announce = [&] {
    ptx::mbarrier_wait(&s.work_empty[slot.slot], slot.parity ^ 1);
    if (leads) {
      Item& work = s.work[slot.slot];
      find(work, p, BlockOrder{p.forward.order, s.own_order, p}, s.line, index, rest_end);
      set_origin(work, rest_end < 0 ? nullptr : &s.work[slot.slot ^ 1]);
      // Where values come apart, the keys of a piece's next item would come while values of this one are still needed,
      // which takes longer (docs/notes/hopper-forward.md). They wait until the consumers are done with these queries.
      if (kAsksAtOnce && rest_end >= 0) ptx::mbarrier_wait(&s.queries_empty[queries.slot], queries.parity ^ 1);
      tell();
    }
  };
  const auto announce_next = [&](unsigned ticket) {
    index = int64(ticket) + target::grid_size() / kCluster;
    announce();
  };
  if (leads) tell();  // the first work has been found (sm90/forward_first_work.cuh)
  for (bool first = true;; first = false) {
    if (!kFindsEarly && !first) announce();
    const Item& work = s.work[slot.slot];
    // The other slot is written again only after all lanes have come here, and so have finished reading it.
    if constexpr (kProducerLanes > 1) target::wave_sync();
    slot.advance();
    if (rest_end < 0) tickets.release_ticket();
    if (!work.exists) break;
    const auto wait_for_mask = [&] {
      // Of the slot before `slot`, which has been advanced.
      if constexpr (kKeyMask) ptx::mbarrier_wait(&s.work_full[slot.slot ^ 1], slot.parity ^ (slot.slot == 0));
    };
    // Under a mask of keys the first key tile is loaded before the mask tells how many tiles there are, unless a window
    // may begin after that tile.
    constexpr bool kLearnsEnd = kKeyMask && !kLeft;
    static_assert(!kLearnsEnd || !kStreamK, "the first one is 0");
    if constexpr (!kLearnsEnd) wait_for_mask();
    const Keys key_tiles = key_tiles_to_load<kLearnsEnd>(p.forward, work);
    TileSpan span = span_of_item(key_tiles, work);
    const int kv_head = work.head / (p.forward.nheads_q / p.forward.nheads_kv);
    const MapRows q_rows = map_rows(work, work.q, p.row_bound_q);
    // At a sequence's end a later block of the cluster may have no rows of its own. It then loads the sequence's first
    // rows, since a box must not lie wholly outside its map (sm90/rows.cuh).
    const int first_row = kCluster == 1 || first_query(work) < work.q.length ? first_query(work) : 0;
    const auto ask_for_queries = [&] {
      if (!leads) return;
      ptx::mbarrier_wait(&s.queries_empty[queries.slot], queries.parity ^ 1);
      load_queries<kBlocksQk, Rows, kTileRows>(s.queries[queries.slot], &maps.q, &s.queries_full[queries.slot], q_rows,
                                               first_row, work.q.length, work.head);
      queries.advance();
    };
    const bool shared = shares_keys(work, span);
    KeyTileLoader<kPageRows> loader(p, work, array_k, 0, lane, shared);
    const auto load_values = [&](int first_key) {
      if constexpr (kValuesApart) return;
      ptx::mbarrier_wait(&barriers.values_empty[values.slot], values.parity ^ 1);
      loader.load<kStoredBlocksV>(Landing::values(s)[values.slot], array_v, &barriers.values_full[values.slot],
                                  first_key, kv_head);
      values.advance();
    };
    // With one slot, queries are else loaded after the first keys: so those keys need not wait until the consumers are
    // done with the queries of the previous tile.
    const bool at_once = kQuerySlots > 1 || (kAsksAtOnce && (first || rest_end >= 0));
    if (at_once && has_tiles(span)) ask_for_queries();
    int first_key = has_tiles(span) ? key_tiles.first_key(span.begin) : 0, before = 0;
    // By how many tiles values come behind keys. Consumers need the values of a tile beside the keys of their next one.
    const int lag = shared ? kConsumers : 1;
    const auto load_last_values = [&] {
      if (lag == 1) {
        load_values(before);
      } else {
#pragma unroll 1
        for (int n = span.end - lag; n < span.end; n++) load_values(key_tiles.first_key(n));
      }
    };
    unsigned ticket = 0;
    const int takes_ticket_at = span.end - kTilesLeft > span.begin ? span.end - kTilesLeft : span.begin;
#pragma unroll 1
    for (int n = span.begin; n < span.end; n++) {
      if constexpr (kLearnsEnd) {
        if (n == 1) {
          wait_for_mask();
          span.end = key_tiles_of(p.forward, work).end;
          if (span.end == 1) break;
        }
      }
      if (kFindsEarly && leads && n == takes_ticket_at) ticket = tickets.take();
      loader.find(key_tiles, n, span.end);
      ptx::mbarrier_wait(&barriers.keys_empty[keys.slot], keys.parity ^ 1);
      loader.load<kStoredBlocksQk>(Landing::keys(s)[keys.slot], array_k, &barriers.keys_full[keys.slot], first_key,
                                   kv_head);
      keys.advance();
      if (n == span.begin) {
        if (!at_once) ask_for_queries();
      } else if (n - lag >= span.begin) {
        load_values(lag == 1 ? before : key_tiles.first_key(n - lag));
      }
      // The bias comes after keys and values: consumers read it once the tile's products are running.
      if constexpr (kBiasInBoxes) {
        if (leads) load_bias(p.forward, maps, s, work, bias, first_row, key_tiles.first_key(n));
      }
      before = first_key;
      if (n + 1 < span.end) first_key = key_tiles.first_key(n + 1);
      if (kFindsEarly && n + 1 == span.end) announce_next(ticket);
    }
    if constexpr (kFindsEarly) {
      if (has_tiles(span)) {
        load_values(before);
      } else {
        announce_next(leads ? tickets.take() : 0);
      }
      continue;
    }
    rest_end = rest_end_of(work);
    if (rest_end >= 0) {
      if (has_tiles(span)) load_last_values();
      continue;
    }
    // Taken no earlier, so that work goes to the block that is done first. It is early enough: the consumers are still
    // busy with tiles that are loaded.
    ticket = leads ? tickets.take() : 0;
    if (has_tiles(span)) load_last_values();
    ticket = tickets.receive(ticket);
    if constexpr (kProducerLanes > 1) {
      if (leads) s.tickets.ticket = ticket;
      target::wave_sync();
      ticket = make_uniform(s.tickets.ticket);
    }
    index = int64(ticket) + target::grid_size() / kCluster;
  }
  if (leads) tickets.finish();
}

// Main loop of a further warp of the producer, which loads its part of all key tiles, or of all value tiles. It waits
// for work and gives its slot back as consumers do.
template <bool kKeys>
DEVICE void produce_part(const Sm90ForwardParams& p, const Maps& maps, SharedMemory& s, int part, int lane) {
  auto& barriers = Landing::barriers(s);
  ptx::Mbarrier* const full = kKeys ? barriers.keys_full : barriers.values_full;
  ptx::Mbarrier* const empty = kKeys ? barriers.keys_empty : barriers.values_empty;
  const KeyArray array = kKeys ? array_of_keys(p, maps) : array_of_values(p, maps);
  Ring<Landing::kSlots> ring;
  Ring<2> slot;
  for (;;) {
    ptx::mbarrier_wait(&s.work_full[slot.slot], slot.parity);
    const Item& work = s.work[slot.slot];
    if (!work.exists) return;
    const Keys key_tiles = key_tiles_of(p.forward, work);
    const TileSpan span = span_of_item(key_tiles, work);
    const int kv_head = work.head / (p.forward.nheads_q / p.forward.nheads_kv);
    const bool shared = shares_keys(work, span);
    KeyTileLoader<kPageRows> loader(p, work, array, part, lane, shared);
    // The second of two warps that divide boxes leaves tiles that consumers do not share to the first one, and does not
    // wait for their slots. The parity of a slot that it comes back to says whether the last tile there was given back,
    // if the one before that was. That one lies 2 * kStages tiles back. Either it belongs to a piece of work before the
    // last one, which all consumers have left; or the last keys of that piece have been asked for, so all consumers
    // have given back the keys kStages tiles before those, and the values two tiles before these.
    const bool skips = kDividesBoxes && part > 0 && !shared && has_tiles(span);
    if (skips) ring.skip(span.count());
#pragma unroll 1
    for (int n = skips ? span.end : span.begin; n < span.end; n++) {
      loader.find(key_tiles, n, span.end);
      ptx::mbarrier_wait(&empty[ring.slot], ring.parity ^ 1);
      if constexpr (kKeys) {
        loader.template load<kStoredBlocksQk>(Landing::keys(s)[ring.slot], array, &full[ring.slot], 0, kv_head);
      } else {
        loader.template load<kStoredBlocksV>(Landing::values(s)[ring.slot], array, &full[ring.slot], 0, kv_head);
      }
      ring.advance();
    }
    target::wave_sync();  // all lanes have read the work slot
    if (lane == 0) ptx::mbarrier_arrive(&s.work_empty[slot.slot]);
    slot.advance();
  }
}

}  // namespace forward
