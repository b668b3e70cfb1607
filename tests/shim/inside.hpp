// Declarations that the simulator's own files share. This state exists only in the child process of a run.
#pragma once

#include <stddef.h>

#include <vector>

#include "machine.hpp"
#include "target/host.cuh"

namespace host {

constexpr int kPoison = 0xff;  // NaN as any floating-point type, -1 as an integer
constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;  // threads of a warpgroup
// Shared-memory address of the first byte that a block asked for, as on an H100. It is the same in every block.
constexpr unsigned kSharedAddress = 1024;

struct Block {
  int index;              // position in the grid
  unsigned char* shared;  // its shared memory
  int syncs;              // block_syncs and cluster_syncs that it has passed
  int threads;            // threads that have not exited
  bool early;             // it has called launch_dependents
  int last_vote;          // the last block_any for which a thread's predicate was true
};

extern Launch launch;
extern std::vector<Block> blocks;  // the blocks of the running cluster, by rank
extern int cluster_syncs;          // cluster_syncs that the running cluster has passed
extern int rank;                   // cluster rank of the running block
extern int running;                // running thread of that block; -1 = the scheduler runs

unsigned draw(unsigned below);  // a random number in [0, below)
// The offset of `bytes` bytes in the running block's shared memory. Fails unless all of them lie inside and the offset
// is a multiple of `alignment`.
size_t offset_in_shared(const void* pointer, size_t bytes, size_t alignment, const char* what);
size_t offset_of_address(unsigned address, size_t bytes, const char* what);
// Fails unless block `to` of the cluster exists and has not exited, so that its shared memory can be accessed.
void check_reaches(int to, const char* what);

// A condition that a single thread waits for, independently of the other lanes of its wave.
struct Condition {
  bool (*holds)(const Condition&);
  void (*tell)(const Condition&, char* text, size_t size);
  int rank;  // cluster rank of the block that waits
  size_t at;
  unsigned long long number;
};
void wait_until(const char* name, const Condition& condition);

// machine.cpp
void run_grid();  // runs the launch, in the child process
// Fails if the block has called launch_dependents before the running thread has called wait_for_prior_kernels.
void check_prerequisites(const char* what);

// wave_copies.cpp
void forget_wave_copies(size_t threads);
void check_wave_copies_at_exit();  // checks the running thread

// mbarrier.cpp
void forget_barriers();
// The mbarrier's offset in shared memory. Fails if the mbarrier at this offset in block `to` is not visible to TMA.
size_t check_mbarrier(const void* barrier, int to, const char* what);
void complete_bytes(int to, size_t offset, unsigned bytes, const char* what);

// tensor_copy.cpp
void forget_copies();
void check_stores_at_exit();  // checks the running thread
size_t copies_under_way();    // copies to shared memory and TMA stores from it that have not happened yet
void deliver_copy();
size_t copies_to(int to, size_t begin, size_t end);  // copies under way to these bytes of block `to`

// warp_group.cpp
void forget_products();
void check_products_at_exit();  // checks the running thread
void check_products_of_block();
bool product_touches(int to, size_t begin, size_t end);

}  // namespace host
