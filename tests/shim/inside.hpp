// What the parts of the machine know of each other. Only the child process of a run has any of it.
#pragma once

#include <stddef.h>

#include <vector>

#include "machine.hpp"
#include "target/host.cuh"

namespace host {

constexpr int kPoison = 0xff;  // NaN as any floating-point type, -1 as an integer
constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;  // threads of a warpgroup
// Where an H100 starts to count the bytes that a block asks for: the same in every block.
constexpr unsigned kSharedAddress = 1024;

struct Block {
  int index;              // in the grid
  unsigned char* shared;  // its memory
  int syncs;              // that it has passed, cluster_syncs among them
  int threads;            // that have not exited
  bool early;             // it has said launch_dependents
};

extern Launch launch;
extern std::vector<Block> blocks;  // of the cluster that runs
extern int cluster_syncs;          // that it has passed
extern int rank;                   // in the cluster, of the block whose turn it is
extern int running;                // its thread whose turn it is; -1 = the scheduler

unsigned draw(unsigned below);  // at random
// Where the bytes lie in shared memory; fails unless all of them do, on a multiple of `alignment`.
size_t offset_in_shared(const void* pointer, size_t bytes, size_t alignment, const char* what);
size_t offset_of_address(unsigned address, size_t bytes, const char* what);
// Fails unless the cluster's block `to` is there for the running thread to reach into.
void check_reaches(int to, const char* what);

// What one thread waits for by itself.
struct Condition {
  bool (*holds)(const Condition&);
  void (*tell)(const Condition&, char* text, size_t size);
  int rank;  // of the block
  size_t at;
  unsigned long long number;
};
void wait_until(const char* name, const Condition& condition);

// machine.cpp
void run_grid();  // the launch, in the child process
// Fails where the block comes early, and the running thread has not waited for what comes before it
void check_prerequisites(const char* what);

// wave_copies.cpp
void forget_wave_copies(size_t threads);
void check_wave_copies_at_exit();  // of the running thread

// mbarrier.cpp
void forget_barriers();
// Where TMA finds the barrier; fails if it does not know of the one in the block `to`.
size_t check_mbarrier(const void* barrier, int to, const char* what);
void complete_bytes(int to, size_t offset, unsigned bytes, const char* what);

// tensor_copy.cpp
void forget_copies();
void check_stores_at_exit();  // of the running thread
size_t copies_under_way();    // to shared memory and from there
void deliver_copy();
size_t copies_to(int to, size_t begin, size_t end);  // under way

// warp_group.cpp
void forget_products();
void check_products_at_exit();  // of the running thread
void check_products_of_block();
bool product_touches(int to, size_t begin, size_t end);

}  // namespace host
