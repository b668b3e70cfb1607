// The setup of a ragged call: all that follows from its lengths alone, in one launch before the others. Some blocks
// order the sequences for the schedule, the others fill padding rows of outputs.
#pragma once

#include "attn/fill_padding.cuh"
#include "attn/helper_params.cuh"
#include "attn/schedule/order_sequences.cuh"
#include "target/target.cuh"

namespace ragged_setup {

constexpr int kThreads = 256;
using Order = OrderSequences<kThreads, LengthsInMemory, const OrderInMemory>;
constexpr int kSharedBytes = Order::kSharedBytes;

// The `found` of run() where all lengths are in GPU memory.
struct InMemory {
  DEVICE Side operator()(const Side& side) const { return side; }
};

// block: its index among the blocks of the setup. found(side): the same side, with the addresses where these blocks may
// read its integers.
template <typename Found>
DEVICE void run(const RaggedSetupParams& p, int block, const Found& found, unsigned char* shared) {
  const int ordering = p.schedules * p.schedule_blocks;
  if (block < ordering) {
    const ScheduleParams& schedule = block < p.schedule_blocks ? p.schedule0 : p.schedule1;
    const Side tiled = found(schedule.tiled), other = found(schedule.other);
    const LengthsInMemory lengths{tiled, other};
    const OrderInMemory ordered{schedule.order};
    const Order order{lengths, schedule.batch, schedule.tile, ordered};
    order(block % p.schedule_blocks, shared);
    return;
  }
  const int filling = block - ordering;
  if (filling >= p.paddings * p.padding_blocks) return;
  const int which = filling / p.padding_blocks;
  const PaddingParams& padding = which == 0 ? p.padding0 : which == 1 ? p.padding1 : p.padding2;
  constexpr int kWaves = kThreads / target::kWave;
  const int wave = filling % p.padding_blocks * kWaves + target::thread_index() / target::kWave;
  fill_padding(padding, found(padding.side), wave, p.padding_blocks * kWaves);
}

}  // namespace ragged_setup
