// Where what depends on nothing that products give is to be computed while they are under way.
#pragma once

#include "target/cuda.cuh"

namespace ptx {

// x is computed above, and nothing of it below: a basic block ends here, which ptxas moves no arithmetic out of. The
// loop is left after one turn, or after two for one x of 2^32.
DEVICE void compute_here(unsigned x) {
  asm volatile(
      "{\n"
      ".reg .pred again;\n"
      ".reg .b32 x;\n"
      "mov.b32 x, %0;\n"
      "AGAIN:\n"
      "xor.b32 x, x, 1;\n"
      "setp.eq.u32 again, x, 0x9E3779B9;\n"
      "@again nanosleep.u32 1;\n"
      "@again bra AGAIN;\n"
      "}\n" ::"r"(x)
      : "memory");
}

// What was stored above is read from memory below: no register keeps it in between.
DEVICE void read_anew() { asm volatile("" ::: "memory"); }

}  // namespace ptx
