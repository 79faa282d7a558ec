// What a fault of memory protection leaves behind before it ends the process: the address, and the
// instruction, from which the debug information knows the line.
#pragma once

#include "common/abi.h"

#ifndef PF_ASAN  // which has a handler of its own, and says more

#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>

namespace pf::host {

inline pf_fault* fault_seen = nullptr;
inline uintptr_t object_base = 0;

// Async-signal-safe: plain stores to memory that outlives the process.
inline void note_fault(int number, siginfo_t* info, void* context) {
  if (info->si_code <= 0) {  // somebody has sent it: no instruction will raise it again
    raise(number);           // ends the process when this returns
    return;
  }
  if (fault_seen == nullptr || fault_seen->signal != 0) return;
  fault_seen->address = reinterpret_cast<int64_t>(info->si_addr);
  fault_seen->is_write = -1;
#if defined(__x86_64__)
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  fault_seen->instruction = static_cast<int64_t>(registers[REG_RIP] - object_base);
  fault_seen->is_write = registers[REG_ERR] >> 1 & 1;  // of the page fault's error code
#elif defined(__aarch64__)
  fault_seen->instruction = static_cast<int64_t>(static_cast<ucontext_t*>(context)->uc_mcontext.pc - object_base);
#else
  (void)context;
#endif
  // An address that is none (not canonical), or a misaligned one of an instruction that wants others.
  if (info->si_code == SI_KERNEL) fault_seen->is_write = -2;
  fault_seen->signal = number;
}

inline bool catch_faults(pf_fault* seen) {
  fault_seen = seen;
  Dl_info own;
  if (dladdr(reinterpret_cast<void*>(&catch_faults), &own) != 0) {
    object_base = reinterpret_cast<uintptr_t>(own.dli_fbase);
  }
  // Fibers' stacks are small, and one of them may be what overflowed.
  static char stack[64 * 1024];
  stack_t alternate = {};
  alternate.ss_sp = stack;
  alternate.ss_size = sizeof(stack);
  struct sigaction action = {};
  action.sa_sigaction = note_fault;
  // Once: the instruction runs again after the handler, and then the fault ends the process.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | static_cast<int>(SA_RESETHAND);
  return sigaltstack(&alternate, nullptr) == 0 && sigaction(SIGSEGV, &action, nullptr) == 0 &&
         sigaction(SIGBUS, &action, nullptr) == 0;
}

}  // namespace pf::host

#endif
