// Barriers: mbarriers in shared memory, which count arrivals and bytes, and the block's sixteen named barriers, which
// count threads.
#include <stdio.h>
#include <string.h>

#include <vector>

#include "inside.hpp"
#include "ptx/host.cuh"

namespace host {
namespace {

constexpr int kMost = (1 << 20) - 1;  // the most arrivals, or bytes, that an mbarrier can count
constexpr int kNamed = 16;

struct Mbarrier {
  int rank;  // cluster rank of its block
  size_t offset;
  int arrivals;     // arrivals that complete a phase
  int pending;      // arrivals that the current phase still lacks
  long long bytes;  // bytes expected minus bytes arrived: below 0 if bytes arrived before they were expected
  unsigned long long phase;
  int owner;                 // the thread that initialised it
  int syncs, cluster_syncs;  // the counts of its block and of the cluster when it was initialised
  bool fenced;               // fence_mbarrier_init has made it visible to TMA
};

struct Named {
  int threads, arrived;
  unsigned long long generation;
  std::vector<int> waves;  // waves that have arrived
};

std::vector<Mbarrier> mbarriers;
std::vector<Named> named;  // kNamed for each block

Named& named_at(int rank, size_t id) { return named[rank * kNamed + id]; }

// The pattern kept in an mbarrier's shared memory: if it has changed, something has overwritten the mbarrier.
unsigned long long mark_of(size_t offset) { return 0xb1a5ed0000000000ull + offset; }

Mbarrier& barrier_at(int rank, size_t offset, const char* what) {
  for (Mbarrier& barrier : mbarriers) {
    if (barrier.rank != rank || barrier.offset != offset) continue;
    unsigned long long mark;
    memcpy(&mark, blocks[rank].shared + offset, sizeof(mark));
    if (mark != mark_of(offset)) fail("%s: the mbarrier at byte %zu was overwritten", what, offset);
    return barrier;
  }
  fail("%s: the mbarrier at byte %zu is not initialised", what, offset);
}

// The mbarrier of block `to` at the offset of `pointer`. Fails unless its initialisation is visible to the running
// thread: after a block_sync (cluster_sync for another block's), or to the thread that initialised it.
Mbarrier& find(const void* pointer, int to, const char* what) {
  const size_t offset = offset_in_shared(pointer, 8, 8, what);
  check_reaches(to, what);
  Mbarrier& barrier = barrier_at(to, offset, what);
  const bool near = to == rank;
  const bool synced = near ? barrier.syncs != blocks[to].syncs : barrier.cluster_syncs != cluster_syncs;
  if (!synced && !(near && barrier.owner == running)) {
    fail("%s: no %s since thread %d initialised the mbarrier at byte %zu", what, near ? "block_sync" : "cluster_sync",
         barrier.owner, offset);
  }
  return barrier;
}

void complete_if_all_came(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes > 0) return;
  if (barrier.bytes < 0) {
    fail("phase %llu of the mbarrier at byte %zu: %lld bytes came that nobody announced", barrier.phase, barrier.offset,
         -barrier.bytes);
  }
  barrier.phase++;
  barrier.pending = barrier.arrivals;
}

void arrive(Mbarrier& barrier, unsigned bytes) {
  barrier.bytes += bytes;
  if (barrier.bytes > kMost) fail("mbarrier_arrive: %lld bytes are more than an mbarrier counts", barrier.bytes);
  if (barrier.pending == 0) {
    fail("mbarrier_arrive: phase %llu of the mbarrier at byte %zu has its %d arrivals already", barrier.phase,
         barrier.offset, barrier.arrivals);
  }
  barrier.pending--;
  complete_if_all_came(barrier);
}

}  // namespace

void forget_barriers() {
  mbarriers.clear();
  named.assign(launch.cluster * kNamed, {});
}

void mbarrier_init(void* pointer, unsigned arrivals) {
  const size_t offset = offset_in_shared(pointer, 8, 8, "mbarrier_init");
  for (const Mbarrier& barrier : mbarriers) {
    if (barrier.rank != rank || barrier.offset != offset) continue;
    fail("mbarrier_init: the mbarrier at byte %zu is initialised already", offset);
  }
  if (arrivals < 1 || arrivals > kMost) fail("mbarrier_init: %u arrivals", arrivals);
  const unsigned long long mark = mark_of(offset);
  memcpy(pointer, &mark, sizeof(mark));
  const int count = static_cast<int>(arrivals);
  mbarriers.push_back({rank, offset, count, count, 0, 0, running, blocks[rank].syncs, cluster_syncs, false});
}

void fence_mbarrier_init() {
  for (Mbarrier& barrier : mbarriers) {
    barrier.fenced = barrier.fenced || (barrier.rank == rank && barrier.owner == running);
  }
}

void mbarrier_arrive(void* pointer, unsigned bytes) { arrive(find(pointer, rank, "mbarrier_arrive"), bytes); }
void mbarrier_arrive_at(void* pointer, int to) { arrive(find(pointer, to, "mbarrier_arrive_at"), 0); }

void mbarrier_wait(void* pointer, unsigned parity) {
  if (parity > 1) fail("mbarrier_wait: parity %u", parity);
  const Mbarrier& barrier = find(pointer, rank, "mbarrier_wait");
  const auto passed = [](const Condition& condition) {
    // Phase n has parity n % 2. All phases before the current one have completed, so a wait for the other parity
    // returns.
    return barrier_at(condition.rank, condition.at, "mbarrier_wait").phase % 2 != condition.number;
  };
  const auto tell = [](const Condition& condition, char* text, size_t size) {
    const Mbarrier& it = barrier_at(condition.rank, condition.at, "mbarrier_wait");
    snprintf(text, size, " for parity %llu: phase %llu lacks %d of %d arrivals and %lld bytes", condition.number,
             it.phase, it.pending, it.arrivals, it.bytes);
  };
  wait_until("mbarrier_wait", {passed, tell, rank, barrier.offset, parity});
}

size_t check_mbarrier(const void* pointer, int to, const char* what) {
  const Mbarrier& barrier = find(pointer, to, what);
  if (!barrier.fenced) fail("%s: no fence_mbarrier_init for the mbarrier at byte %zu", what, barrier.offset);
  return barrier.offset;
}

void complete_bytes(int to, size_t offset, unsigned bytes, const char* what) {
  Mbarrier& barrier = barrier_at(to, offset, what);
  barrier.bytes -= bytes;
  if (barrier.bytes < -kMost) fail("%s: %lld bytes are more than an mbarrier counts", what, -barrier.bytes);
  complete_if_all_came(barrier);
}

void named_barrier(int id, int threads, bool waits) {
  struct Arrival {
    int id, threads;
    unsigned long long generation;
  };
  const auto arrive = [](void* const* payloads) {
    const Arrival& first = *static_cast<const Arrival*>(payloads[0]);
    Named& barrier = named_at(rank, first.id);
    for (int lane = 0; lane < launch.wave; lane++) {
      Arrival& mine = *static_cast<Arrival*>(payloads[lane]);
      if (mine.threads != first.threads)
        fail("barrier %d: lanes count %d and %d", mine.id, first.threads, mine.threads);
      mine.generation = barrier.generation;
    }
    if (barrier.arrived == 0) barrier.threads = first.threads;
    if (barrier.threads != first.threads) {
      fail("barrier %d: some count %d threads, others %d", first.id, barrier.threads, first.threads);
    }
    const int wave = running / launch.wave;
    for (const int other : barrier.waves) {
      if (other == wave) fail("barrier %d: wave %d arrives again before the others have come", first.id, wave);
    }
    barrier.waves.push_back(wave);
    barrier.arrived += launch.wave;
    if (barrier.arrived == barrier.threads) {
      barrier.arrived = 0;
      barrier.generation++;
      barrier.waves.clear();
    }
  };
  const auto passed = [](const Condition& condition) {
    return named_at(condition.rank, condition.at).generation != condition.number;
  };
  const auto tell = [](const Condition& condition, char* text, size_t size) {
    const Named& it = named_at(condition.rank, condition.at);
    snprintf(text, size, ": %d of %d threads came", it.arrived, it.threads);
  };
  if (id < 1 || id >= kNamed || threads < 1 || threads > launch.threads || threads % launch.wave != 0) {
    fail("barrier %d for %d threads of %d", id, threads, launch.threads);
  }
  Arrival mine{id, threads, 0};
  meet_wave(waits ? "barrier_sync" : "barrier_arrive", id, arrive, &mine);
  if (waits) wait_until("barrier_sync", {passed, tell, rank, static_cast<size_t>(id), mine.generation});
}

}  // namespace host
