// The machine under target/host.cuh: fibers for threads, a scheduler for the waves of a block,
// shared memory between pages that fault, copies that stay away until they are waited for.
#include "machine.hpp"

#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "target/host.cuh"

#if defined(__x86_64__) && !defined(SHIM_UCONTEXT)

struct Context {
  void* stack_pointer;
};
// Saves what a function must preserve on the stack of `from`, then continues where `to` stopped.
extern "C" void shim_switch(Context* from, const Context* to);
asm(R"(
  .text
  .globl shim_switch
  .hidden shim_switch
  .type shim_switch, @function
shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size shim_switch, . - shim_switch
)");

static void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  // As if `entry` had been called from nowhere: its return address is 0, and 16 bytes are aligned
  // before that was pushed.
  void** top = reinterpret_cast<void**>(stack + bytes - 16);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  top -= 6;
  memset(top, 0, 6 * sizeof(void*));
  context.stack_pointer = top;
}

#else

#include <ucontext.h>

struct Context {
  ucontext_t state;
};
static void shim_switch(Context* from, const Context* to) { swapcontext(&from->state, &to->state); }

static void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = bytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

#endif

namespace host {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kStackBytes = 64 * kPage;
constexpr int kPoison = 0xff;  // NaN as any floating-point type, -1 as an integer
constexpr unsigned kSecondsAllowed = 120;
const char* const kBlockSync = "block_sync";

struct Copy {
  void* shared;
  const void* global;
  int bytes;
  bool valid;
};

struct Fiber {
  Context context;
  bool exited;
  // What it waits for.
  const char* name;
  int detail;
  Combine combine;
  void* payload;
  std::vector<Copy> copies;
  size_t committed;  // of them
};

// Only the child process of a run has these.
Launch launch;
int block;
int running = -1;  // the thread whose turn it is; -1 = the scheduler
Context scheduler;
std::vector<Fiber> fibers;
unsigned char* stacks;
unsigned char* shared;
unsigned random_state;

unsigned draw(unsigned below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state % below;
}

// `bytes` of memory that start on a page and have a page that faults before and after them.
unsigned char* fenced(size_t bytes) {
  const size_t body = (bytes + kPage - 1) / kPage * kPage;
  void* const region = mmap(nullptr, body + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (region == MAP_FAILED) fail("no memory for %zu bytes", bytes);
  unsigned char* const start = static_cast<unsigned char*>(region) + kPage;
  if (body != 0) mprotect(start, body, PROT_READ | PROT_WRITE);
  return start;
}

void thread_main() {
  launch.kernel(launch.params);
  Fiber& self = fibers[running];
  if (!self.copies.empty()) fail("exits while %zu of its copies were never waited for", self.copies.size());
  self.exited = true;
  shim_switch(&self.context, &scheduler);
}

void wait(const char* name, int detail, Combine combine, void* payload) {
  Fiber& self = fibers[running];
  self.name = name;
  self.detail = detail;
  self.combine = combine;
  self.payload = payload;
  shim_switch(&self.context, &scheduler);
}

void take_turn(int thread) {
  running = thread;
  shim_switch(&scheduler, &fibers[thread].context);
  running = -1;
}

bool meets(const Fiber& a, const Fiber& b) {
  if (a.exited || b.exited) return a.exited && b.exited;
  return strcmp(a.name, b.name) == 0 && a.detail == b.detail;
}

void describe(char* text, size_t size, int thread) {
  const Fiber& fiber = fibers[thread];
  if (fiber.exited) {
    snprintf(text, size, "thread %d has exited", thread);
  } else {
    snprintf(text, size, "thread %d waits in %s(%d)", thread, fiber.name, fiber.detail);
  }
}

[[noreturn]] void diverged(const char* what, int a, int b) {
  char first[128], second[128];
  describe(first, sizeof(first), a);
  describe(second, sizeof(second), b);
  fail("threads of one %s diverged: %s, %s", what, first, second);
}

// Lets every lane run until it waits or exits, then completes what they wait for. False when the
// wave can go no further.
bool advance(int wave) {
  const int first = wave * launch.wave;
  const bool backward = draw(2) != 0;
  for (int lane = 0; lane < launch.wave; lane++) {
    take_turn(first + (backward ? launch.wave - 1 - lane : lane));
  }
  void* payloads[64];
  for (int lane = 0; lane < launch.wave; lane++) {
    if (!meets(fibers[first], fibers[first + lane])) diverged("wave", first, first + lane);
    payloads[lane] = fibers[first + lane].payload;
  }
  if (fibers[first].exited || fibers[first].name == kBlockSync) return false;
  fibers[first].combine(payloads);
  return true;
}

void run_block() {
  memset(shared, kPoison, (launch.shared_bytes + kPage - 1) / kPage * kPage);
  for (int thread = 0; thread < launch.threads; thread++) {
    Fiber& fiber = fibers[thread];
    fiber.exited = false;
    fiber.name = "";
    fiber.committed = 0;
    prepare(fiber.context, stacks + thread * (kStackBytes + kPage), kStackBytes, thread_main);
  }
  // How long a wave stays ahead: it keeps its turn up to the next barrier, or loses it now and
  // then, or nearly always.
  const unsigned turns[] = {1u << 30, 16, 2};
  const unsigned stays = turns[draw(3)];
  std::vector<int> ready;
  do {
    ready.clear();
    for (int wave = 0; wave < launch.threads / launch.wave; wave++) ready.push_back(wave);
    unsigned chosen = draw(ready.size());
    while (!ready.empty()) {
      if (!advance(ready[chosen])) {
        ready.erase(ready.begin() + chosen);
        if (!ready.empty()) chosen = draw(ready.size());
      } else if (draw(stays) == 0) {
        chosen = draw(ready.size());
      }
    }
    for (int thread = 1; thread < launch.threads; thread++) {
      if (!meets(fibers[0], fibers[thread])) diverged("block", 0, thread);
    }
  } while (!fibers[0].exited);
  for (size_t i = launch.shared_bytes; i % kPage != 0; i++) {
    if (shared[i] != kPoison) fail("byte %zu of shared memory was written, but there are %d", i, launch.shared_bytes);
  }
}

void on_fault(int signal, siginfo_t* info, void*) {
  const size_t into_stacks = static_cast<unsigned char*>(info->si_addr) - stacks;
  const size_t into_shared = static_cast<unsigned char*>(info->si_addr) - shared;
  if (signal != SIGSEGV && signal != SIGBUS) fail("%s", strsignal(signal));
  if (into_stacks + kPage < launch.threads * (kStackBytes + kPage) + kPage)
    fail("a thread needs more than %zu bytes of stack", kStackBytes);
  if (into_shared + kPage < launch.shared_bytes + 3 * kPage) {
    fail("byte %lld of shared memory was touched, but there are %d", static_cast<long long>(into_shared),
         launch.shared_bytes);
  }
  fail("address %p was touched", info->si_addr);
}

void run_grid() {
  // A thread that overflows its stack needs another one to say so.
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

  shared = fenced(launch.shared_bytes);
  stacks = fenced(launch.threads * (kStackBytes + kPage));
  for (int thread = 0; thread < launch.threads; thread++) {
    // Stacks grow downwards: the page after a stack ends the next one.
    mprotect(stacks + thread * (kStackBytes + kPage) + kStackBytes, kPage, PROT_NONE);
  }
  fibers.resize(launch.threads);
  // Seeds that differ a little give turns that differ a lot.
  random_state = launch.seed * 2654435761u | 1u;
  for (block = 0; block < launch.grid; block++) run_block();
}

}  // namespace

int thread_index() { return running; }
int block_index() { return block; }

unsigned char* shared_memory(int bytes) {
  if (bytes > launch.shared_bytes) fail("uses %d bytes of shared memory, launched with %d", bytes, launch.shared_bytes);
  return shared;
}

void meet_wave(const char* name, int detail, Combine combine, void* payload) { wait(name, detail, combine, payload); }
void meet_block() { wait(kBlockSync, 0, nullptr, nullptr); }

void copy_later(void* to, const void* from, int bytes, bool valid) {
  const size_t offset = static_cast<unsigned char*>(to) - shared;
  if (offset + bytes > static_cast<size_t>(launch.shared_bytes) || offset % bytes != 0) {
    fail("copies %d bytes to byte %lld of %d of shared memory", bytes, static_cast<long long>(offset),
         launch.shared_bytes);
  }
  if (valid && reinterpret_cast<size_t>(from) % bytes != 0)
    fail("copies %d bytes from %p, which is not aligned", bytes, from);
  memset(to, kPoison, bytes);
  fibers[running].copies.push_back({to, from, bytes, valid});
}

void commit_copies() { fibers[running].committed = fibers[running].copies.size(); }

void perform_copies() {
  Fiber& self = fibers[running];
  for (size_t i = 0; i < self.committed; i++) {
    const Copy& copy = self.copies[i];
    if (copy.valid) {
      memcpy(copy.shared, copy.global, copy.bytes);
    } else {
      memset(copy.shared, 0, copy.bytes);
    }
  }
  self.copies.erase(self.copies.begin(), self.copies.begin() + self.committed);
  self.committed = 0;
}

void multiply_add(float* c, const float* a, const float* b, int depth) {
  for (int row = 0; row < 16; row++) {
    for (int k = 0; k < depth; k++) {
      for (int column = 0; column < 16; column++) c[16 * row + column] += a[16 * row + k] * b[16 * k + column];
    }
  }
}

void fail(const char* format, ...) {
  char text[512];
  int length = snprintf(text, sizeof(text), "block %d, ", block);
  length += running < 0 ? 0 : snprintf(text + length, sizeof(text) - length, "thread %d: ", running);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text + length, sizeof(text) - length, format, arguments);
  va_end(arguments);
  dprintf(STDERR_FILENO, "%s\n", text);
  _exit(1);
}

int run(const Launch& asked, char* report, int report_bytes) {
  int ends[2];
  // Compilers that another thread starts meanwhile must not hold the writing end open.
  if (asked.threads % asked.wave != 0 || pipe2(ends, O_CLOEXEC) != 0) {
    snprintf(report, report_bytes, "cannot launch %d threads in waves of %d", asked.threads, asked.wave);
    return 1;
  }
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    launch = asked;
    run_grid();
    _exit(0);
  }
  close(ends[1]);
  int length = 0;
  for (ssize_t got; (got = read(ends[0], report + length, report_bytes - 1 - length)) > 0;) length += got;
  report[length] = '\0';
  close(ends[0]);
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) < 0) {
    snprintf(report, report_bytes, "no child process");
    return 1;
  }
  if (WIFSIGNALED(status)) snprintf(report + length, report_bytes - length, "ended by signal %d", WTERMSIG(status));
  return status != 0;
}

}  // namespace host
