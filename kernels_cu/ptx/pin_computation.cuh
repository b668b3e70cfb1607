// Keeps arithmetic that does not depend on running products at its place beside them. Otherwise ptxas would move it
// down, past the wait for the products.
#pragma once

#include "target/cuda.cuh"

namespace ptx {

// x, and all that it depends on, is computed before this point. The loop ends a basic block, and ptxas moves no
// arithmetic out of a basic block. The loop runs once, or twice for one of the 2^32 values of x.
DEVICE void pin_computation(unsigned x) {
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

// What was stored before this point is read from memory again after it: no register keeps it in between.
DEVICE void compiler_fence() { asm volatile("" ::: "memory"); }

}  // namespace ptx
