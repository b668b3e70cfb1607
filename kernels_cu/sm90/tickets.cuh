// Dynamic scheduling of persistent blocks. A ticket is an index of the schedule. Blocks take tickets one after the
// other from a counter in global memory. In a cluster the first block takes each ticket and sends it to all of its
// blocks.
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
  unsigned* const counters;  // tickets taken, blocks done; zero between launches
  TicketBox& box;
  unsigned parity = 0;

  DEVICE Tickets(unsigned* counters, TicketBox& box) : counters(counters), box(box) {}

  DEVICE static void init(TicketBox& box) {
    if constexpr (kCluster > 1) {
      ptx::mbarrier_init(&box.full, 1);
      ptx::mbarrier_init(&box.empty, kCluster);
    }
  }
  // Takes a ticket; receive() returns it. Without a cluster the counter's answer is still in flight when this returns,
  // and nothing waits for it before it is used.
  DEVICE unsigned take() const {
    if (cluster_rank<kCluster>() != 0) return 0;
    const unsigned ticket = target::fetch_increment_deferred(counters);
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
  // Tells the first block that this one is done with its latest ticket, so that its TicketBox may be written again.
  // Called when the ticket's work has been found, not when the ticket was read, since the arrival orders no memory
  // accesses.
  // It is also called for the first work, which needs no ticket: only then may the first ticket be sent.
  DEVICE void release_ticket() const {
    if constexpr (kCluster > 1) ptx::mbarrier_arrive_at(&box.empty, 0);
  }
  // Called by each block that has run out of work. The last one resets the counters to zero for the next launch.
  DEVICE void finish() const {
    if (target::fetch_add(counters + 1, 1u) == target::grid_size() - 1) {
      counters[0] = 0;
      counters[1] = 0;
    }
  }
};

}  // namespace sm90
