// Stacks, and switching between them.
//
// Only threads that wait at a barrier need a stack of their own; the others are calls on a spare one
// (grid.h). The switch saves what the calling convention makes a callee save, and nothing else.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif
#ifdef PF_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace pf::host {

#if defined(__x86_64__) || defined(__aarch64__)

using Context = void*;  // the stack pointer; everything else lies on the stack

extern "C" __attribute__((visibility("hidden"))) void pf_host_switch(Context* save, Context load);

#if defined(__x86_64__)
asm(R"(
  .text
  .p2align 4
  .hidden pf_host_switch
  .globl pf_host_switch
  .type pf_host_switch, @function
pf_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size pf_host_switch, .-pf_host_switch
)");

inline Context fresh_context(char* top, void (*entry)()) {
  auto* slot = reinterpret_cast<void**>(top);
  *--slot = nullptr;  // where a caller's return address would be
  *--slot = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--slot = nullptr;
  return slot;
}
#else
asm(R"(
  .text
  .p2align 4
  .hidden pf_host_switch
  .globl pf_host_switch
  .type pf_host_switch, @function
pf_host_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size pf_host_switch, .-pf_host_switch
)");

inline Context fresh_context(char* top, void (*entry)()) {
  auto* slots = reinterpret_cast<void**>(top - 160);
  for (int index = 0; index < 20; ++index) slots[index] = nullptr;
  slots[11] = reinterpret_cast<void*>(entry);  // x30: where `ret` goes
  return slots;
}
#endif

#else  // another processor: slower, and needs nothing of ours

using Context = ucontext_t;

inline void pf_host_switch(Context* save, const Context& load) { swapcontext(save, &load); }

#endif

struct Stack {
  char* low = nullptr;
  char* top = nullptr;
  Context context{};
  void* fake_stack = nullptr;  // AddressSanitizer's
  Stack* next = nullptr;       // in the list of spare ones

  static constexpr size_t kBytes = 256 * 1024;  // address space: pages are touched on use
};

// The stack of whoever called the launcher, while a fiber runs.
struct Caller {
  Context context{};
  void* fake_stack = nullptr;
  const void* low = nullptr;
  size_t bytes = 0;
};

inline Caller caller;
inline Stack* spare_stacks = nullptr;
inline int64_t stacks_created = 0;

inline Stack* take_stack() {
  if (Stack* stack = spare_stacks) {
    spare_stacks = stack->next;
    return stack;
  }
  constexpr size_t kGuard = 4096 * 16;  // a multiple of every page size in use
  void* memory = mmap(nullptr, kGuard + Stack::kBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0) {
    std::fputs("pagefuzz: no memory for the stack of an emulated thread\n", stderr);
    std::abort();
  }
  ++stacks_created;
  Stack* stack = new Stack;
  stack->low = static_cast<char*>(memory) + kGuard;
  // Tops at one distance from each other would share a few cache sets.
  stack->top = stack->low + Stack::kBytes - stacks_created % 128 * 128;
  return stack;
}

inline void give_back(Stack* stack) {
  stack->next = spare_stacks;
  spare_stacks = stack;
}

/// Gives back a stack whose thread never ends; its frames hold nothing that needs a destructor.
inline void abandon(Stack* stack) {
#ifdef PF_ASAN
  __asan_unpoison_memory_region(stack->low, Stack::kBytes);
#endif
  give_back(stack);
}

inline void prepare(Stack* stack, void (*entry)()) {
  stack->fake_stack = nullptr;
#if defined(__x86_64__) || defined(__aarch64__)
  stack->context = fresh_context(stack->top, entry);
#else
  getcontext(&stack->context);
  stack->context.uc_stack.ss_sp = stack->low;
  stack->context.uc_stack.ss_size = static_cast<size_t>(stack->top - stack->low);
  stack->context.uc_link = nullptr;
  makecontext(&stack->context, entry, 0);
#endif
}

/// From the caller's stack: runs `stack` until it switches back.
inline void enter(Stack* stack) {
#ifdef PF_ASAN
  __sanitizer_start_switch_fiber(&caller.fake_stack, stack->low, Stack::kBytes);
#endif
  pf_host_switch(&caller.context, stack->context);
#ifdef PF_ASAN
  __sanitizer_finish_switch_fiber(caller.fake_stack, nullptr, nullptr);
#endif
}

/// First thing on a fresh stack.
inline void entered() {
#ifdef PF_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &caller.low, &caller.bytes);
#endif
}

/// From `stack`: back to the caller; returns when it is entered again, never if it `ends`.
inline void leave(Stack* stack, bool ends) {
#ifdef PF_ASAN
  __sanitizer_start_switch_fiber(ends ? nullptr : &stack->fake_stack, caller.low, caller.bytes);
#endif
  (void)ends;
  pf_host_switch(&stack->context, caller.context);
#ifdef PF_ASAN
  __sanitizer_finish_switch_fiber(stack->fake_stack, &caller.low, &caller.bytes);
#endif
}

}  // namespace pf::host
