// What the kernels are compiled for: CUDA, or the host emulation in its place.
//
// Flags, set by harness/build.py: PF_CHECKED, PF_UBSAN, PF_ASAN, PF_COVERAGE.
#pragma once

#include "common/abi.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define PF_COLD __noinline__
#define PF_OUTLINE __noinline__
#else
#include "host/emulation.h"
#define PF_COLD __attribute__((noinline, cold))
#define PF_OUTLINE __attribute__((noinline))
#endif

#if defined(PF_CHECKED) || defined(PF_UBSAN)
#define PF_RECORDS 1  // there is a pf_check_record to fill
#endif
