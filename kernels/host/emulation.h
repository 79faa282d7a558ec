// The part of CUDA that the kernels use, for g++ and clang++: one OS thread, CTAs one after another.
//
// What is not declared here is a compile error, so that nothing is emulated by accident. Shared memory
// is static and keeps what the previous CTA left in it, as on the device.
#pragma once

#include <cstdint>
#include <cstring>

#include "host/vocabulary.h"

// After all standard headers: some of them use names like these in attributes.
#include "host/grid.h"

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

// ---- atomics: one OS thread, so plain arithmetic is atomic -----------------------------------------

inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long amount) {
  const unsigned long long old = *address;
  *address = old + amount;
  return old;
}

inline unsigned long long atomicCAS(unsigned long long* address, unsigned long long expected,
                                    unsigned long long desired) {
  const unsigned long long old = *address;
  if (old == expected) *address = desired;
  return old;
}

// ---- barriers ---------------------------------------------------------------------------------------

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  pf::host::wait_at({pf::host::Barrier::kBlock, file, line});
}

inline void __syncwarp(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  pf::host::wait_at({pf::host::Barrier::kWarp, file, line});
}

// ---- exchanges within a warp ------------------------------------------------------------------------

inline unsigned __reduce_max_sync(unsigned mask, unsigned value, const char* file = __builtin_FILE(),
                                  int line = __builtin_LINE()) {
  return pf::host::warp_max(mask, value, {pf::host::Barrier::kWarp, file, line});
}
