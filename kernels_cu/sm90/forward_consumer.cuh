// A consumer warpgroup of Hopper's forward: its positions in the rings, the turns it takes with other consumers, and
// the two products of a key tile. The loop over key tiles is in sm90/forward.cu.
#pragma once

#include "ptx/ptx.cuh"
#include "sm90/forward_bias.cuh"
#include "sm90/forward_bias_rows.cuh"
#include "sm90/forward_ramp.cuh"
#include "sm90/forward_shared_keys.cuh"
#include "sm90/forward_work.cuh"

namespace forward {

struct Consumer {
  SharedMemory& s;
  const int index, lane, warp;                        // index: of this consumer; warp: 0 to 3 in the warpgroup
  const unsigned long long first_keys, first_values;  // wgmma descriptors of the rings' first slots
  const unsigned shared;                              // address of s in shared memory
  Ring<kStages> keys, values;
  // From one key tile that this consumer computes to its next: 1, or kConsumers where consumers share key tiles.
  int stride = 1;
  OwnBias bias;
  Slopes<kRamp> slopes;

  DEVICE Consumer(SharedMemory& s, int index)
      : s(s),
        index(index),
        lane(target::thread_index() % 32),
        warp(target::thread_index() / 32 % 4),
        first_keys(make_uniform_descriptor(s.keys[0], 0, kKeyGroupStride)),
        first_values(make_uniform_descriptor(s.values[0], kBlockStride, kValueGroupStride)),
        shared(make_uniform(target::shared_address(&s))),
        bias(s, tile_row(index * 64 + warp * 16), lane),
        slopes(s, index) {}

  // With kPingPong, take_turn() waits until this consumer may issue products, and pass_turn() lets the next consumer
  // issue its own.
  DEVICE void take_turn() const {
    if constexpr (kPingPong) ptx::barrier_sync(kTurn + index, 2 * kWarpgroup);
  }
  DEVICE void pass_turn() const {
    if constexpr (kPingPong) ptx::barrier_arrive(kTurn + (index + 1 == kConsumers ? 0 : index + 1), 2 * kWarpgroup);
  }

  // The descriptor of a slot, from that of the first one. The addition is in 32 bits: from a pointer to the slot the
  // compiler would compute all 64 bits of the descriptor.
  template <int kSlotBytes>
  DEVICE static unsigned long long of_slot(unsigned long long first, int slot) {
    return first + static_cast<unsigned>(slot * (kSlotBytes / 16));
  }
  // The full and the empty barrier of a slot of keys are addressed by one register and constant offsets. Those of
  // values must not be: the compiler would put their address into a register of a descriptor that running products
  // still read, and the next product would wait (docs/notes/hopper-forward.md).
  static constexpr int kKeysFull = sizeof(Tiles), kKeysEmpty = kKeysFull + sizeof(s.keys_full);
  DEVICE unsigned keys_barriers() const { return shared + keys.slot * static_cast<int>(sizeof(ptx::Mbarrier)); }
  DEVICE void wait_for_keys() const {
    ptx::mbarrier_wait<kKeysFull>(keys_barriers(), keys.parity);
    fence_row_copies();
  }
  DEVICE void wait_for_values() const {
    ptx::mbarrier_wait(&s.values_full[values.slot], values.parity);
    fence_row_copies();
  }
  // Where lanes of the producer copied the tile, makes their copies visible to wgmma. Tiles of 8 bits need no fence
  // here: the warps that convert them have issued it.
  DEVICE static void fence_row_copies() {
    if constexpr (kCopiesRows && !kFloat8) ptx::fence_async_proxy();
  }

  // Issues S = Q K^T for the key tile in the ring's current slot, and does not wait for it. beyond: the tile lies
  // beyond the diagonal, which decides the side of a two-sided ramp (sm90/forward_ramp.cuh).
  DEVICE void start_scores(C (&scores)[1][kKeyBlocks], unsigned long long q, bool beyond) const {
    const unsigned long long k = of_slot<kKeyBytes>(first_keys, keys.slot);
    ptx::wgmma_fence();
    UNROLL for (int step = 0; step < kDepthQk / 16; step++) {
      Qk::ss<ptx::Major::K, ptx::Major::K>(scores[0], q + step / 4 * (kTileRows * 8) + step % 4 * 2,
                                           k + step / 4 * (kBlockStride / 16) + step % 4 * 2, step > 0);
    }
    slopes.add(scores[0], beyond);
    ptx::wgmma_commit();
  }
  // Issues O += P V for the value tile in the ring's current slot, and does not wait for it.
  DEVICE void start_output(C (&o)[1][kOutBlocks], const M::A (&p)[kKeyBlocks]) const {
    const unsigned long long v = of_slot<kValueBytes>(first_values, values.slot);
    ptx::wgmma_fence();
    UNROLL for (int step = 0; step < kKeyBlocks; step++) {
      Pv::rs<ptx::Major::MN>(o[0], p[step], v + step * (2 * kValueGroupStride / 16));
    }
    ptx::wgmma_commit();
  }
  DEVICE void release(ptx::Mbarrier* barrier) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
  // Whether this lane gives back a slot of keys or values. One lane does so for each consumer that this one acts for.
  DEVICE bool gives_back() const { return kSharesKeys ? lane < stride : lane == 0; }
  DEVICE void advance(Ring<kStages>& ring) const {
    if constexpr (kSharesKeys) {
      ring.advance_by(stride);
    } else {
      ring.advance();
    }
  }
  // Gives a slot of keys or values back to every block of the cluster, since each of them loads a part of it.
  DEVICE void release_keys() {
    if constexpr (kCluster == 1) {
      if (gives_back()) ptx::mbarrier_arrive<kKeysEmpty>(keys_barriers());
    } else {
      if (lane < kCluster) ptx::mbarrier_arrive_at(&s.keys_empty[keys.slot], lane);
    }
    advance(keys);
  }
  DEVICE void release_values() {
    if constexpr (kFloat8) {
      ptx::mbarrier_arrive(&s.values_empty[values.slot]);  // every lane arrives: each may have zeroed rows
    } else if constexpr (kCluster == 1) {
      if (gives_back()) ptx::mbarrier_arrive(&s.values_empty[values.slot]);
    } else {
      if (lane < kCluster) ptx::mbarrier_arrive_at(&s.values_empty[values.slot], lane);
    }
    advance(values);
  }
  // Passes over a key tile that other consumers need and none of this consumer's rows sees. Its slots may be given back
  // only once they are full and every lane has seen it. An earlier arrival would count for the slot's previous tile:
  // the slot could be filled again, and a lane that still waits would miss this tile. (Where a tile is computed, the
  // products synchronise the lanes.)
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

  // Where consumers share key tiles: moves to the first one of this consumer, from the first of all.
  DEVICE void begin_shared() {
    keys.advance_by(index);
    values.advance_by(index);
  }
  // Moves to where all consumers go on. past: how many tiles behind the last one this consumer is.
  DEVICE void end_shared(int past) {
    if (past < index) {  // it has computed a tile less than the first consumer, and has a turn left
      take_turn();
      pass_turn();
    }
    keys.retreat_by(past);
    values.retreat_by(past);
  }
};

}  // namespace forward
