// The core of the simulator under target/host.cuh: a fiber for each thread, a scheduler for the waves of a cluster's
// blocks, and shared memory between two guard pages that fault when touched. wave_copies.cpp has cp.async;
// mbarrier.cpp, tensor_copy.cpp and warp_group.cpp have the features that only Hopper has.
#include "machine.hpp"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "fiber.hpp"
#include "inside.hpp"
#include "target/host.cuh"

namespace host {

Launch launch;
std::vector<Block> blocks;
int cluster_syncs;
int rank;
int running = -1;

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kStackBytes = 64 * kPage;
constexpr unsigned kSecondsAllowed = 120;  // of one launch, until SIGALRM ends the child process
constexpr unsigned kNever = 1u << 30;      // draw(kNever) == 0 practically never

enum class Waits {
  kNot,
  kWave,       // for the other lanes of the wave
  kBlock,      // for the other threads of the block
  kCluster,    // for the other threads of the cluster
  kCondition,  // for a condition of its own
  kExited,
};

struct Fiber {
  Context context;
  Waits waits;
  const char* name;
  int detail;
  Combine combine;
  void* payload;
  Condition condition;
  bool waited;  // it has called wait_for_prior_kernels
  int votes;    // how many times it has called block_any
};

bool prior_kernels_done;  // a thread of the running cluster has waited for them
Context scheduler;
std::vector<Fiber> fibers;  // index: rank of the block x threads of a block + thread
unsigned char* stacks;
unsigned random_state;

// Allocates `bytes` of memory that begin at a page boundary, with a guard page that faults on either side.
unsigned char* fenced(size_t bytes) {
  const size_t body = (bytes + kPage - 1) / kPage * kPage;
  void* const region = mmap(nullptr, body + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (region == MAP_FAILED) fail("no memory for %zu bytes", bytes);
  unsigned char* const start = static_cast<unsigned char*>(region) + kPage;
  if (body != 0) mprotect(start, body, PROT_READ | PROT_WRITE);
  return start;
}

// Writes what an earlier kernel writes at its end, or what was there before. The kernel itself may only read it.
void write_late(bool done) {
  for (int n = 0; n < launch.late_count; n++) {
    const LateWrite& write = launch.late[n];
    unsigned char* const to = static_cast<unsigned char*>(write.to);
    unsigned char* const page = to - reinterpret_cast<size_t>(to) % kPage;
    const size_t bytes = to + write.bytes - page;
    mprotect(page, bytes, PROT_READ | PROT_WRITE);
    memcpy(to, done ? write.after : write.before, write.bytes);
    mprotect(page, bytes, PROT_READ);
  }
}

Fiber& running_fiber() { return fibers[rank * launch.threads + running]; }

void set_running(int fiber) {
  rank = fiber / launch.threads;
  running = fiber % launch.threads;
}

// Called by the last thread of the block that exits.
void check_block_at_exit() {
  const size_t copies = copies_to(rank, 0, launch.shared_bytes);
  if (copies != 0) fail("ends while %zu copies are under way", copies);
  check_products_of_block();
  for (size_t i = launch.shared_bytes; i % kPage != 0; i++) {
    if (blocks[rank].shared[i] == kPoison) continue;
    fail("byte %zu of shared memory was written, but there are %d", i, launch.shared_bytes);
  }
}

void thread_main() {
  launch.kernel(launch.params);
  Fiber& self = running_fiber();
  check_wave_copies_at_exit();
  check_prerequisites("exits");
  check_products_at_exit();
  check_stores_at_exit();
  if (--blocks[rank].threads == 0) check_block_at_exit();
  self.waits = Waits::kExited;
  shim_switch(&self.context, &scheduler);
}

void wait(Waits waits, const char* name, int detail, Combine combine, void* payload) {
  Fiber& self = running_fiber();
  self.waits = waits;
  self.name = name;
  self.detail = detail;
  self.combine = combine;
  self.payload = payload;
  shim_switch(&self.context, &scheduler);
}

bool can_run(const Fiber& fiber) {
  return fiber.waits == Waits::kNot || (fiber.waits == Waits::kCondition && fiber.condition.holds(fiber.condition));
}

void take_turn(int fiber) {
  fibers[fiber].waits = Waits::kNot;
  set_running(fiber);
  shim_switch(&scheduler, &fibers[fiber].context);
  running = -1;
}

bool meets(const Fiber& a, const Fiber& b) {
  if (a.waits != b.waits || a.waits == Waits::kExited) return a.waits == b.waits;
  return strcmp(a.name, b.name) == 0 && a.detail == b.detail;
}

void describe(char* text, size_t size, int n) {
  const Fiber& fiber = fibers[n];
  int length = launch.cluster == 1 ? 0 : snprintf(text, size, "block %d, ", blocks[n / launch.threads].index);
  length += snprintf(text + length, size - length, "thread %d ", n % launch.threads);
  if (fiber.waits == Waits::kExited) {
    snprintf(text + length, size - length, "has exited");
    return;
  }
  length += snprintf(text + length, size - length, "waits in %s(%d)", fiber.name, fiber.detail);
  if (fiber.waits == Waits::kCondition) fiber.condition.tell(fiber.condition, text + length, size - length);
}

[[noreturn]] void diverged(const char* what, int a, int b) {
  char first[256], second[256];
  describe(first, sizeof(first), a);
  describe(second, sizeof(second), b);
  fail("threads of one %s diverged: %s, %s", what, first, second);
}

// Completes a wave-wide operation if all lanes of the wave wait in the same one.
void complete_meeting(int wave) {
  const int first = wave * launch.wave;
  void* payloads[64];
  for (int lane = 0; lane < launch.wave; lane++) {
    const Fiber& fiber = fibers[first + lane];
    if (fiber.waits != Waits::kWave || !meets(fibers[first], fiber)) return;
    payloads[lane] = fiber.payload;
  }
  set_running(first);
  fibers[first].combine(payloads);
  running = -1;
  for (int lane = 0; lane < launch.wave; lane++) fibers[first + lane].waits = Waits::kNot;
}

// Runs each lane that can run until it waits or exits; at random only the first few lanes, from either end of the wave.
// Returns false when no lane can run. The operation that the lanes then wait in is completed by the next call, so other
// waves may run before that.
bool advance(int wave) {
  const int first = wave * launch.wave;
  complete_meeting(wave);
  const bool backward = draw(2) != 0;
  const int lanes = draw(4) == 0 ? static_cast<int>(draw(launch.wave)) : launch.wave;
  bool can = false;
  for (int n = 0; n < launch.wave; n++) {
    const int thread = first + (backward ? launch.wave - 1 - n : n);
    if (!can_run(fibers[thread])) continue;
    can = true;
    if (n < lanes) take_turn(thread);
  }
  int met = -1;
  for (int thread = first; thread < first + launch.wave; thread++) {
    if (fibers[thread].waits == Waits::kNot || fibers[thread].waits == Waits::kCondition) continue;
    if (met >= 0 && !meets(fibers[met], fibers[thread])) diverged("wave", met, thread);
    if (met < 0) met = thread;
  }
  return can;
}

// Reports what each thread waits for when none can continue. Threads of a wave that wait in the same operation are
// reported once.
[[noreturn]] void deadlock() {
  char text[4096];
  int length = 0;
  for (int thread = 0; thread < static_cast<int>(fibers.size()); thread++) {
    const int first = thread / launch.wave * launch.wave;
    bool told = fibers[thread].waits == Waits::kExited && thread != first;
    for (int other = first; other < thread && !told; other++) told = meets(fibers[other], fibers[thread]);
    if (told || length > static_cast<int>(sizeof(text)) - 300) continue;
    length += snprintf(text + length, sizeof(text) - length, "; ");
    describe(text + length, sizeof(text) - length, thread);
    length += static_cast<int>(strlen(text + length));
  }
  fail("deadlock%s", text);
}

bool all_wait(Waits waits, int begin, int end) {
  for (int n = begin; n < end; n++) {
    if (fibers[n].waits != waits) return false;
  }
  return true;
}

void pass_sync(int block) {
  blocks[block].syncs++;
  for (int n = 0; n < launch.threads; n++) fibers[block * launch.threads + n].waits = Waits::kNot;
}

// Completes a cluster_sync in which all threads of the cluster wait. Otherwise completes a block_sync in which all
// threads of a block wait: of one random block at a time, so that this block gets ahead of the others. Returns false if
// there is neither.
bool complete_sync() {
  if (all_wait(Waits::kCluster, 0, static_cast<int>(fibers.size()))) {
    cluster_syncs++;
    for (int block = 0; block < launch.cluster; block++) pass_sync(block);
    return true;
  }
  std::vector<int> complete;
  for (int block = 0; block < launch.cluster; block++) {
    if (all_wait(Waits::kBlock, block * launch.threads, (block + 1) * launch.threads)) complete.push_back(block);
  }
  if (!complete.empty()) pass_sync(complete[draw(static_cast<unsigned>(complete.size()))]);
  return !complete.empty();
}

// Called when no wave can run: completes a barrier, or delivers a copy. Returns false when all blocks are done, and
// fails on a deadlock.
bool leave_standstill() {
  if (complete_sync()) return true;
  if (copies_under_way() != 0) {
    deliver_copy();
    return true;
  }
  const int count = static_cast<int>(fibers.size());
  if (all_wait(Waits::kExited, 0, count)) return false;
  for (const Fiber& fiber : fibers) {
    if (fiber.waits == Waits::kCondition) deadlock();
  }
  for (int n = 0; n < count; n++) {
    const int first = n / launch.threads * launch.threads;
    if (!meets(fibers[first], fibers[n])) diverged("block", first, n);
  }
  for (int n = launch.threads; n < count; n += launch.threads) {
    if (!meets(fibers[0], fibers[n])) diverged("cluster", 0, n);
  }
  fail("neither a block nor the cluster goes on");
}

void run_waves() {
  // After each step another wave is chosen with probability 1 / stays: never (a wave runs until it waits), seldom or
  // often. After each step a copy is delivered with probability 1 / delay; with kNever, copies arrive only when no wave
  // can run.
  const unsigned turns[] = {kNever, 16, 2};
  const unsigned delays[] = {kNever, 40, 6, 1};
  const unsigned stays = turns[draw(3)];
  const unsigned delay = delays[draw(4)];
  const int waves = static_cast<int>(fibers.size()) / launch.wave;
  std::vector<int> ready;
  std::vector<int> waiting;  // waves with a lane that waits for a condition: any event may fulfil it
  const auto wake = [&] {
    ready.insert(ready.end(), waiting.begin(), waiting.end());
    waiting.clear();
  };
  do {
    ready.clear();
    waiting.clear();
    for (int wave = 0; wave < waves; wave++) ready.push_back(wave);
    unsigned chosen = draw(ready.size());
    while (!ready.empty()) {
      const int wave = ready[chosen];
      if (advance(wave)) {
        wake();
        if (draw(stays) == 0) chosen = draw(ready.size());
      } else {
        ready.erase(ready.begin() + chosen);
        for (int lane = 0; lane < launch.wave; lane++) {
          if (fibers[wave * launch.wave + lane].waits != Waits::kCondition) continue;
          waiting.push_back(wave);
          break;
        }
        if (!ready.empty()) chosen = draw(ready.size());
      }
      if (copies_under_way() != 0 && draw(delay) == 0) {
        deliver_copy();
        wake();
        if (chosen >= ready.size() && !ready.empty()) chosen = draw(ready.size());
      }
    }
  } while (leave_standstill());
}

void run_cluster(int first_block) {
  for (int n = 0; n < launch.cluster; n++) {
    Block& block = blocks[n];
    block = {first_block + n, block.shared, 0, launch.threads, false, 0};
    memset(block.shared, kPoison, (launch.shared_bytes + kPage - 1) / kPage * kPage);
  }
  for (size_t n = 0; n < fibers.size(); n++) {
    Fiber& fiber = fibers[n];
    fiber.waits = Waits::kNot;
    fiber.name = "";
    fiber.waited = false;
    fiber.votes = 0;
    prepare(fiber.context, stacks + n * (kStackBytes + kPage), kStackBytes, thread_main);
  }
  cluster_syncs = 0;
  prior_kernels_done = false;
  write_late(false);
  forget_barriers();
  forget_products();
  forget_copies();
  forget_wave_copies(fibers.size());
  run_waves();
}

void on_fault(int signal, siginfo_t* info, void*) {
  const size_t into_stacks = static_cast<unsigned char*>(info->si_addr) - stacks;
  const size_t into_shared = static_cast<unsigned char*>(info->si_addr) - blocks[rank].shared;
  if (signal != SIGSEGV && signal != SIGBUS) fail("%s", strsignal(signal));
  if (into_stacks + kPage < fibers.size() * (kStackBytes + kPage) + kPage)
    fail("a thread needs more than %zu bytes of stack", kStackBytes);
  if (into_shared + kPage < launch.shared_bytes + 3 * kPage) {
    fail("byte %lld of shared memory was touched, but there are %d", static_cast<long long>(into_shared),
         launch.shared_bytes);
  }
  fail("address %p was touched", info->si_addr);
}

}  // namespace

void run_grid() {
  // The handler runs on a stack of its own, since a fault may be the overflow of a thread's stack.
  static unsigned char fault_stack[16 * kPage];
  stack_t other{};
  other.ss_sp = fault_stack;
  other.ss_size = sizeof(fault_stack);
  sigaltstack(&other, nullptr);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(signal, &action, nullptr);
  alarm(kSecondsAllowed);

  blocks.resize(launch.cluster);
  for (Block& block : blocks) block.shared = fenced(launch.shared_bytes);
  fibers.resize(launch.cluster * launch.threads);
  stacks = fenced(fibers.size() * (kStackBytes + kPage));
  for (size_t n = 0; n < fibers.size(); n++) {
    // Stacks grow downwards: the guard page after a stack catches an overflow of the next stack.
    mprotect(stacks + n * (kStackBytes + kPage) + kStackBytes, kPage, PROT_NONE);
  }
  // Spreads seeds, so that consecutive ones give unrelated orders; xorshift needs a state other than 0.
  random_state = launch.seed * 2654435761u | 1u;
  for (int block = 0; block < launch.grid; block += launch.cluster) run_cluster(block);
}

int thread_index() { return running; }
int block_index() { return blocks[rank].index; }
int cluster_rank() { return rank; }
int grid_size() { return launch.grid; }

unsigned draw(unsigned below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state % below;
}

void meet_wave(const char* name, int detail, Combine combine, void* payload) {
  wait(Waits::kWave, name, detail, combine, payload);
}
void meet_block() { wait(Waits::kBlock, "block_sync", 0, nullptr, nullptr); }
bool block_any(bool predicate) {
  const int vote = ++running_fiber().votes;
  if (predicate) blocks[rank].last_vote = vote;
  meet_block();
  const bool any = blocks[rank].last_vote == vote;
  meet_block();  // nobody votes again before all have read
  return any;
}
void meet_cluster() { wait(Waits::kCluster, "cluster_sync", 0, nullptr, nullptr); }

void wait_until(const char* name, const Condition& condition) {
  if (condition.holds(condition)) return;
  running_fiber().condition = condition;
  wait(Waits::kCondition, name, static_cast<int>(condition.at), nullptr, nullptr);
}

void launch_dependents() { blocks[rank].early = true; }
void wait_for_prior_kernels() {
  running_fiber().waited = true;
  if (!prior_kernels_done) write_late(true);
  prior_kernels_done = true;
}
void check_prerequisites(const char* what) {
  if (blocks[rank].early && !running_fiber().waited) fail("%s before it waited for prerequisites", what);
}

void multiply_add(float* c, const float* a, const float* b, int depth) {
  for (int row = 0; row < 16; row++) {
    for (int k = 0; k < depth; k++) {
      for (int column = 0; column < 16; column++) c[16 * row + column] += a[16 * row + k] * b[16 * k + column];
    }
  }
}

}  // namespace host
