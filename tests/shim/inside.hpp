// What the parts of the machine know of each other. Only the child process of a run has any of it.
#pragma once

#include <stddef.h>

#include "machine.hpp"
#include "target/host.cuh"

namespace host {

constexpr int kPoison = 0xff;  // NaN as any floating-point type, -1 as an integer
constexpr int kGroup = 128;    // threads of a warp group

extern Launch launch;
extern int running;            // the thread whose turn it is; -1 = the scheduler
extern unsigned char* shared;  // of the block that runs
extern int block_syncs;        // that the block has passed

unsigned draw(unsigned below);  // at random
// Where the bytes lie in shared memory; fails unless all of them do, on a multiple of `alignment`.
size_t place_in_shared(const void* pointer, size_t bytes, size_t alignment, const char* what);
unsigned char* at_shared_address(unsigned address, size_t bytes, const char* what);

// What one thread waits for by itself.
struct Condition {
  bool (*holds)(const Condition&);
  void (*tell)(const Condition&, char* text, size_t size);
  size_t place;
  unsigned long long number;
};
void wait_until(const char* name, const Condition& condition);

// mbarrier.cpp
void forget_barriers();
void check_mbarrier(const void* barrier);
void complete_bytes(const void* barrier, unsigned bytes);

// tensor_copy.cpp
size_t copies_under_way();
void deliver_copy();
bool copy_touches(size_t begin, size_t end);

// wgmma.cpp
void forget_products();
void check_products_at_exit();  // of the running thread
void check_products_of_block();
bool product_touches(size_t begin, size_t end);

}  // namespace host
