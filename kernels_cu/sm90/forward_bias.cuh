// A 16-bit bias that is loaded beside the keys to a ring of its own, in Hopper's forward. This file is for boxes that
// TMA loads; sm90/forward_bias_rows.cuh is for a bias that TMA cannot read.
#pragma once

#include "sm90/forward_work.cuh"

namespace forward {

template <class Maps>
DEVICE void prefetch_bias_map(const Maps& maps) {
  ptx::prefetch_tensormap(&maps.bias);
}

// The row of a slot that has the bias of a row of the tile.
DEVICE int slot_row(const TileRow& row) {
  return (kBiasHeads > 1 ? row.head * kBiasRows : 0) + (kBiasRows > 1 ? row.row : 0);
}

// The producer's part: loads the boxes of a key tile. What lies outside the bias arrives as zeros; no sequence has such
// keys and rows. Where a stride is 0 the map's axis has one element, so the coordinate is 0.
template <class Maps, class SharedMemory>
DEVICE void load_bias(const ForwardParams& p, const Maps& maps, SharedMemory& s, const WorkTile& work,
                      Ring<kBiasSlots>& bias, int first_row, int first_key) {
  ptx::mbarrier_wait(&s.bias_empty[bias.slot], bias.parity ^ 1);
  ptx::Mbarrier* const full = &s.bias_full[bias.slot];
  ptx::mbarrier_arrive_expect(full, kBiasBoxes * kBiasRows * kBiasHeads * 128);
  const int row = kBiasRows == 1 ? 0 : first_row;
  const int head = p.bias.head == 0 ? 0 : work.head / p.bias.group;
  const int batch = p.bias.batch == 0 ? 0 : work.sequence;
  UNROLL for (int b = 0; b < kBiasBoxes; b++) {
    ptx::copy_tensor_5d(s.boxes.bytes + kOutputBytes + bias.slot * kBiasBytes + b * kBiasBoxBytes, &maps.bias, full,
                        first_key + b * kColumns, row, head, batch, 0);
  }
  bias.advance();
}

// A consumer warp's position in the ring of the bias, whether boxes or rows fill it.
struct BiasRing {
  Ring<kBiasSlots> ring;

  template <class SharedMemory>
  DEVICE void wait(SharedMemory& s) const {
    ptx::mbarrier_wait(&s.bias_full[ring.slot], ring.parity);
  }
  // Gives the slot back.
  template <class SharedMemory>
  DEVICE void release(SharedMemory& s, int lane) {
    target::wave_sync();
    if (lane == 0) ptx::mbarrier_arrive(&s.bias_empty[ring.slot]);
    ring.advance();
  }
  // Passes over a key tile that the warp's rows do not see.
  template <class SharedMemory>
  DEVICE void skip(SharedMemory& s, int lane) {
    wait(s);
    release(s, lane);
  }
};

// Reads the bias of a consumer warp's 16 rows by ldmatrix.
struct BiasReader : BiasRing {
  unsigned row;  // the address of the lane's first 16 bytes in the first slot

  // own: the warp's first row in the tile.
  template <class SharedMemory>
  DEVICE BiasReader(SharedMemory& s, const TileRow& own, int lane) {
    if constexpr (kBiasInBoxes) {
      const int n = slot_row(own) + (kBiasRows > 1 ? lane % 16 : 0);
      row = target::shared_address(s.boxes.bytes) + kOutputBytes + n * 128 + (lane / 16 ^ n % 8) * 16;
    }
  }

  // Called for each piece of work. Nothing to do: boxes lie at the same offsets in all.
  template <class SharedMemory>
  DEVICE void begin(SharedMemory&, const Bias&, const WorkTile&, const TileRow&, int, int) {}

  // Reads the bias of the key tile in the ring's current slot, and gives the slot back.
  template <class Added, class SharedMemory>
  DEVICE void read(Added& added, SharedMemory& s, int lane) {
    wait(s);
    read_blocks<0>(added, row + ring.slot * kBiasBytes);
    release(s, lane);
  }

 private:
  // 16 keys are 32 bytes of a row. The swizzle is an exclusive or with bits of the row, so the offset of a block in its
  // row is one too.
  template <int kBlock, class Added>
  DEVICE void read_blocks(Added& added, unsigned slot) {
    if constexpr (kBlock < kKeyBlocks) {
      ptx::ldmatrix<kBlock / 4 * kBiasBoxBytes>(added.bias[kBlock], slot ^ kBlock % 4 * 32);
      read_blocks<kBlock + 1>(added, slot);
    }
  }
};

}  // namespace forward
