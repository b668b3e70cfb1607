// What a ragged call does that follows from its lengths alone, in one launch: some blocks order the sequences, the
// others fill padding rows of outputs.
#pragma once

#include "attn/params.cuh"
#include "portable/fill_padding.cuh"
#include "portable/order_sequences.cuh"
#include "target/target.cuh"

namespace ragged_setup {

constexpr int kThreads = 256;
using Order = OrderSequences<kThreads>;
constexpr int kSharedBytes = Order::kSharedBytes;

// found: gives a side whose integers are where these blocks may read them.
template <typename Found>
DEVICE void run(const RaggedSetupParams& p, const Found& found, unsigned char* shared) {
  const int block = target::block_index();
  const int ordering = p.schedules * p.schedule_blocks;
  if (block < ordering) {
    const ScheduleParams& schedule = block < p.schedule_blocks ? p.schedule0 : p.schedule1;
    const Order order{schedule, found(schedule.q_side), found(schedule.k_side)};
    order(block % p.schedule_blocks, shared);
    return;
  }
  const int filling = block - ordering;
  if (filling >= p.paddings * p.padding_blocks) return;
  const int which = filling / p.padding_blocks;
  const PaddingParams& padding = which == 0 ? p.padding0 : which == 1 ? p.padding1 : p.padding2;
  fill_padding<kThreads>(padding, found(padding.side), filling % p.padding_blocks);
}

}  // namespace ragged_setup
