// What every object exports beside its launchers. Included once, by the operation's .cu.
#pragma once

#include "common/checking.h"
#include "common/injection.h"
#include "common/scan.h"

#ifndef __CUDACC__
#include "host/faults.h"
#include "host/ubsan.h"
#endif

PF_EXPORT int pf_abi_version(void) { return PF_ABI_VERSION; }

PF_EXPORT int pf_build_flags(void) {
  int flags = 0;
#ifdef __CUDACC__
  flags |= PF_BUILD_CUDA;
#endif
#ifdef PF_CHECKED
  flags |= PF_BUILD_CHECKED;
#endif
#ifdef PF_UBSAN
  flags |= PF_BUILD_UBSAN;
#endif
#ifdef PF_ASAN
  flags |= PF_BUILD_ASAN;
#endif
#ifdef PF_COVERAGE
  flags |= PF_BUILD_COVERAGE;
#endif
#ifdef PF_INJECT
  flags |= PF_BUILD_INJECT;
#endif
  return flags;
}

PF_EXPORT int pf_check_begin(const pf_permissions* permissions, int32_t buffer_count) {
#ifdef PF_RECORDS
  if (buffer_count < 0 || buffer_count > pf::check::kMaxBuffers) return PF_REFUSED;
  static pf::check::State fresh;  // kilobytes: not for the stack
  fresh = pf::check::State{};
  for (int32_t buffer = 0; buffer < buffer_count; ++buffer) fresh.permissions[buffer] = permissions[buffer];
#ifdef __CUDACC__
  if (cudaMemcpyToSymbol(pf::check::state, &fresh, sizeof(fresh)) != cudaSuccess ||
      cudaDeviceSynchronize() != cudaSuccess) {
    (void)cudaGetLastError();
    return PF_LAUNCH_FAILED;
  }
#else
  pf::check::state = fresh;
#endif
  return PF_OK;
#else
  (void)permissions;
  (void)buffer_count;
  return PF_REFUSED;
#endif
}

PF_EXPORT int pf_check_end(pf_check_record* record) {
#ifdef PF_RECORDS
#ifdef __CUDACC__
  static pf::check::State seen;
  if (cudaDeviceSynchronize() != cudaSuccess ||
      cudaMemcpyFromSymbol(&seen, pf::check::state, sizeof(seen)) != cudaSuccess) {
    (void)cudaGetLastError();
    return PF_LAUNCH_FAILED;
  }
  pf::check::summarise(seen, record);
#else
  pf::check::summarise(pf::check::state, record);
#endif
  return PF_OK;
#else
  (void)record;
  return PF_REFUSED;
#endif
}

PF_EXPORT int pf_set_order(int32_t order, uint64_t seed) {
#ifdef __CUDACC__
  (void)order;
  (void)seed;
  return PF_REFUSED;
#else
  if (order < PF_ORDER_FORWARD || order > PF_ORDER_WARP_INTERLEAVED) return PF_REFUSED;
  pf::host::order_kind = order;
  pf::host::order_seed = seed;
  return PF_OK;
#endif
}

PF_EXPORT int pf_inject(const pf_injection* injection) {
#ifdef PF_INJECT
  pf::injected = *injection;
  return PF_OK;
#else
  (void)injection;
  return PF_REFUSED;
#endif
}

PF_EXPORT int pf_catch_faults(pf_fault* seen) {
#if defined(__CUDACC__) || defined(PF_ASAN)
  (void)seen;
  return PF_REFUSED;
#else
  return pf::host::catch_faults(seen) ? PF_OK : PF_LAUNCH_FAILED;
#endif
}

#ifdef PF_COVERAGE
extern "C" void __gcov_dump(void);
extern "C" void __gcov_reset(void);
#endif

PF_EXPORT int pf_coverage_dump(void) {
#ifdef PF_COVERAGE
  __gcov_dump();
  __gcov_reset();  // else nothing that runs from here on would be written
  return PF_OK;
#else
  return PF_REFUSED;
#endif
}
