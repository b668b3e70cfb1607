#include "fiber.hpp"

#include <string.h>

#if defined(__x86_64__) && !defined(SHIM_UCONTEXT)

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

void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  // The stack looks as if `entry` had just been called: its return address is 0, and the stack pointer was a multiple
  // of 16 before that address was pushed. Below it are the six registers that shim_switch pops.
  void** top = reinterpret_cast<void**>(stack + bytes - 16);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  top -= 6;
  memset(top, 0, 6 * sizeof(void*));
  context.stack_pointer = top;
}

#else

void shim_switch(Context* from, const Context* to) { swapcontext(&from->state, &to->state); }

void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = bytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

#endif
