// A block's threads as coroutines of the host. A switch keeps the registers that a call keeps, and
// asks nothing of the kernel, as swapcontext does for its mask of signals: a block switches a
// million times. Included by the ptx.cuh of this folder.
#pragma once
#ifdef __x86_64__
#include <cstdint>

typedef void* HostStack;  // the top of a stack that waits: registers and return address
extern "C" __attribute__((visibility("hidden"))) void switch_stacks(HostStack* from,
                                                                    const HostStack* to);
asm(R"(
  .pushsection .text
switch_stacks:
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
  .popsection
)");
inline void switch_to(HostStack& from, const HostStack& to) { switch_stacks(&from, &to); }
// A place at the begin of `function`, which never returns.
inline void begin_at(HostStack& place, unsigned char* stack, size_t bytes, void (*function)()) {
  void** top = (void**)((uintptr_t)(stack + bytes) & ~(uintptr_t)15);
  *--top = nullptr;  // at a function's entry the stack is 8 bytes off a multiple of 16
  *--top = (void*)function;
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  place = top;
}
#else
#include <ucontext.h>

typedef ucontext_t HostStack;
inline void switch_to(HostStack& from, const HostStack& to) { swapcontext(&from, &to); }
inline void begin_at(HostStack& place, unsigned char* stack, size_t bytes, void (*function)()) {
  getcontext(&place);
  place.uc_stack.ss_sp = stack, place.uc_stack.ss_size = bytes, place.uc_link = nullptr;
  makecontext(&place, function, 0);
}
#endif
