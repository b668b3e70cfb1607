// The producer of a Hopper forward block walks the schedule and keeps TMA ahead of the consumers: one
// thread. Where keys are in pages, two warps: a lane finds a box and asks for it, and values have the second warp,
// since one would ask for boxes no faster than the products take them. Those may copy rows as well
// (sm90/forward_page_rows.cuh).
#pragma once

#include "sm90/forward_bias.cuh"
#include "sm90/forward_block.cuh"
#include "sm90/forward_float8.cuh"
#include "sm90/forward_key_mask.cuh"
#include "sm90/forward_page_rows.cuh"
#include "sm90/forward_pages.cuh"

namespace forward {

// Under a mask query tiles are begun often, and the next one is found by looks at its order and at its list. So a
// ticket is drawn when kTilesLeft key tiles are left, and its work is found with the last one. Elsewhere it is found
// later, so that work goes to whoever is done first, and where tiles are split.
constexpr bool kFindsEarly = kBlockMask && !kStreamK;
constexpr int kTilesLeft = 3;

DEVICE void find(WorkTile& work, const Sm90ForwardParams& p, const BlockOrder& order, int64 index) {
  work = find_work_tile<kRagged, kRight, kClusterQ, kHeadsPerTile>(p.forward, order, index, p.kept_tiles);
  if constexpr (kBlockMask) {
    if (work.exists && p.forward.block_mask.lists.order != nullptr) {
      const int last = (work.q.length - 1) / kClusterQ;
      const int rank = kRight ? last - work.tile : work.tile;
      const int tile = *order_of<kClusterQ>(p.forward.block_mask.lists, work.sequence, work.q, rank, work.head);
      // Of sequences that lie over each other, which only a device can tell of, it may be another's.
      work.tile = tile < last ? tile : last;
    }
  }
  if constexpr (kPaged) {
    if (work.exists) work.k.length = length_in_pages(p.forward.pages, work.sequence, work.k.length);
  }
}
DEVICE void find(WorkTile& work, const Sm90ForwardParams& p, const BlockOrder& order, int64 index, int) {
  find(work, p, order, index);
}
DEVICE StreamLine stream_line(const Sm90ForwardParams& p, const BlockOrder& order, int64 index) {
  if constexpr (kRagged) {
    const unsigned workers = static_cast<unsigned>(target::grid_size()) / kCluster;
    const auto key_tiles = [&](int64 n) {
      WorkTile work;
      find(work, p, order, n);
      return work.exists ? key_tiles_of(p.forward, work).count() : 0;
    };
    return StreamLine::of_ragged<kClusterQ, kHeadsPerTile>(p.forward, order, p.stream_k, workers, index, key_tiles);
  } else {
    return StreamLine::of_dense<kClusterQ, kHeadsPerTile>(p.forward, p.stream_k);
  }
}
DEVICE void find(WorkItem& work, const Sm90ForwardParams& p, const BlockOrder& order, int64 index, int at) {
  if (kUnlike && p.stream_k.rows > 0) {
    const UnlikeLine<kClusterQ, kHeadsPerTile> line{p.forward, p.stream_k};
    line.find(work, index, at, [&](const WorkTile& tile) {
      const int count = key_tiles_of(p.forward, tile).count();
      return count > 0 ? count : 1;
    });
  } else {
    index = stream_line(p, order, index).find(work, index, at);
    ptx::read_anew();
    find(static_cast<WorkTile&>(work), p, order, index);
  }
  if (!work.exists) return;
  const TileSpan all = key_tiles_of(p.forward, work);
  work.keys = work.whole ? all : part_of(all, work.keys.begin, work.keys.end, work.units);
}
// Where the piece goes on in the line; negative where it does not.
DEVICE int next_item(const WorkItem& work) { return work.goes_on ? work.behind() : -1; }
DEVICE int next_item(const WorkTile&) { return -1; }

// By the length alone, or by all that is known.
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
  int at = -1;  // in the line, of those items behind the first one that a ticket may stand for
  // Finds the work of the next slot and tells everyone.
  const auto announce = [&] {
    ptx::mbarrier_wait(&s.work_empty[slot.slot], slot.parity ^ 1);
    if (leads) {
      find(s.work[slot.slot], p, BlockOrder{p.forward.order, s.own_order, p}, index, at);
      ptx::mbarrier_arrive(&(kKeyMask ? s.work_found : s.work_full)[slot.slot]);
    }
  };
  const auto announce_next = [&](unsigned ticket) {
    index = int64(ticket) + target::grid_size() / kCluster;
    announce();
  };
  if constexpr (kFindsEarly) announce();
  for (;;) {
    if constexpr (!kFindsEarly) announce();
    const Item& work = s.work[slot.slot];
    // All lanes have read the other slot before it is written again: they come here for this one first.
    if constexpr (kProducerLanes > 1) target::wave_sync();
    slot.advance();
    if (at < 0) tickets.spent();
    if (!work.exists) break;
    const auto wait_for_mask = [&] {
      // The slot before the one that is next.
      if constexpr (kKeyMask) ptx::mbarrier_wait(&s.work_full[slot.slot ^ 1], slot.parity ^ (slot.slot == 0));
    };
    // The first key tile is asked for before it is known how many there are, unless a window may begin behind it.
    constexpr bool kLearnsEnd = kKeyMask && !kLeft;
    static_assert(!kLearnsEnd || !kStreamK, "the first one is 0");
    if constexpr (!kLearnsEnd) wait_for_mask();
    const Keys key_tiles = key_tiles_to_load<kLearnsEnd>(p.forward, work);
    TileSpan span = span_of_item(key_tiles, work);
    const int kv_head = work.head / (p.forward.nheads_q / p.forward.nheads_kv);
    const MapRows q_rows = map_rows(work, work.q, p.row_bound_q);
    // At a sequence's end a later block of the cluster may have no rows of its own.
    const int first_row = kCluster == 1 || first_query(work) < work.q.length ? first_query(work) : 0;
    const auto ask_for_queries = [&] {
      if (!leads) return;
      ptx::mbarrier_wait(&s.queries_empty[queries.slot], queries.parity ^ 1);
      load_queries<kBlocksQk, Rows, kTileRows>(s.queries[queries.slot], &maps.q, &s.queries_full[queries.slot], q_rows,
                                               first_row, work.q.length, work.head);
      queries.advance();
    };
    KeyTileLoader<kPageRows> loader(p, work, array_k, 0, lane);
    const auto load_values = [&](int first_key) {
      if constexpr (kValuesApart) return;
      ptx::mbarrier_wait(&barriers.values_empty[values.slot], values.parity ^ 1);
      loader.load<kStoredBlocksV>(Landing::values(s)[values.slot], array_v, &barriers.values_full[values.slot],
                                  first_key, kv_head);
      values.advance();
    };
    // With one slot behind the first keys: these need not wait until consumers are done with the last tile's queries.
    if (kQuerySlots > 1 && has_tiles(span)) ask_for_queries();
    int first_key = has_tiles(span) ? key_tiles.first_key(span.begin) : 0, before = 0;
    unsigned ticket = 0;
    const int draws_at = span.end - kTilesLeft > span.begin ? span.end - kTilesLeft : span.begin;
#pragma unroll 1
    for (int n = span.begin; n < span.end; n++) {
      if constexpr (kLearnsEnd) {
        if (n == 1) {
          wait_for_mask();
          span.end = key_tiles_of(p.forward, work).end;
          if (span.end == 1) break;
        }
      }
      if (kFindsEarly && leads && n == draws_at) ticket = tickets.draw();
      loader.find(key_tiles, n, span.end);
      ptx::mbarrier_wait(&barriers.keys_empty[keys.slot], keys.parity ^ 1);
      loader.load<kStoredBlocksQk>(Landing::keys(s)[keys.slot], array_k, &barriers.keys_full[keys.slot], first_key,
                                   kv_head);
      keys.advance();
      if (n > span.begin) {
        load_values(before);
      } else if (kQuerySlots == 1) {
        ask_for_queries();
      }
      // Behind what is wanted first: consumers ask for it when the tile's products are under way.
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
        announce_next(leads ? tickets.draw() : 0);
      }
      continue;
    }
    at = next_item(work);
    if (at >= 0) {
      if (has_tiles(span)) load_values(before);
      continue;
    }
    // Not earlier: work goes to whoever is done first, and consumers are still busy with what is loaded.
    ticket = leads ? tickets.draw() : 0;
    if (has_tiles(span)) load_values(before);
    ticket = tickets.receive(ticket);
    if constexpr (kProducerLanes > 1) {
      if (leads) s.tickets.ticket = ticket;
      target::wave_sync();
      ticket = make_uniform(s.tickets.ticket);
    }
    index = int64(ticket) + target::grid_size() / kCluster;
  }
  if (leads) tickets.leave();
}

// Another warp's part of all keys, or of all values. It learns of work as consumers do.
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
    KeyTileLoader<kPageRows> loader(p, work, array, part, lane);
#pragma unroll 1
    for (int n = span.begin; n < span.end; n++) {
      loader.find(key_tiles, n, span.end);
      ptx::mbarrier_wait(&empty[ring.slot], ring.parity ^ 1);
      if constexpr (kKeys) {
        loader.template load<kStoredBlocksQk>(Landing::keys(s)[ring.slot], array, &full[ring.slot], 0, kv_head);
      } else {
        loader.template load<kStoredBlocksV>(Landing::values(s)[ring.slot], array, &full[ring.slot], 0, kv_head);
      }
      ring.advance();
    }
    target::wave_sync();  // all lanes have read the slot
    if (lane == 0) ptx::mbarrier_arrive(&s.work_empty[slot.slot]);
    slot.advance();
  }
}

}  // namespace forward
