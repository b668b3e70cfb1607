// Execution contexts with stacks of their own (fibers), and the switch from one to another.
#pragma once

#include <stddef.h>

#if defined(__x86_64__) && !defined(SHIM_UCONTEXT)

struct Context {
  void* stack_pointer;
};
// Saves the callee-saved registers on the current stack and its pointer in `from`, then continues where `to` stopped.
extern "C" void shim_switch(Context* from, const Context* to);

#else

#include <ucontext.h>

struct Context {
  ucontext_t state;
};
void shim_switch(Context* from, const Context* to);

#endif

// Makes a context that starts with `entry`, which must never return.
void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)());
