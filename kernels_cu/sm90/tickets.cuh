// Tickets are indices of the schedule, which persistent blocks draw one after the other. The first block of a cluster
// draws them, and tells all of its blocks.
#pragma once

#include "ptx/ptx.cuh"
#include "sm90/pipeline.cuh"
#include "target/target.cuh"

namespace sm90 {

// In the shared memory of each block.
struct TicketBox {
  ptx::Mbarrier full, empty;
  unsigned ticket;
};

template <int kCluster>
struct Tickets {
  unsigned* const counters;  // tickets drawn, blocks done; zero between launches
  TicketBox& box;
  unsigned parity = 0;

  DEVICE Tickets(unsigned* counters, TicketBox& box) : counters(counters), box(box) {}

  DEVICE static void init(TicketBox& box) {
    if constexpr (kCluster > 1) {
      ptx::mbarrier_init(&box.full, 1);
      ptx::mbarrier_init(&box.empty, kCluster);
    }
  }
  // A lone block's ticket is on its way when this returns.
  DEVICE unsigned draw() const {
    if (cluster_rank<kCluster>() != 0) return 0;
    const unsigned ticket = target::fetch_increment(counters);
    if constexpr (kCluster > 1) {
      ptx::mbarrier_wait(&box.empty, parity);
      for (int to = 0; to < kCluster; to++) ptx::send(&box.ticket, ticket, &box.full, to);
    }
    return ticket;
  }
  DEVICE unsigned receive(unsigned ticket) {
    if constexpr (kCluster > 1) {
      ptx::mbarrier_arrive_expect(&box.full, sizeof(ticket));
      ptx::mbarrier_wait(&box.full, parity);
      parity ^= 1;
      ticket = box.ticket;
    }
    return ticket;
  }
  // Nobody needs the last ticket any more, if there was one: not when it was read, but when its work was found with it,
  // as the arrival orders nothing.
  DEVICE void spent() const {
    if constexpr (kCluster > 1) ptx::mbarrier_arrive_at(&box.empty, 0);
  }
  // The last block to run out of work leaves the counters as it found them, for the next launch.
  DEVICE void leave() const {
    if (target::fetch_add(counters + 1, 1u) == target::grid_size() - 1) {
      counters[0] = 0;
      counters[1] = 0;
    }
  }
};

}  // namespace sm90
