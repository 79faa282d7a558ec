// The one way a kernel is launched, on both targets.
#pragma once

#include <tuple>

#include "common/message.h"
#include "common/target.h"

#ifdef __CUDACC__
#include <atomic>
#endif

namespace pf {

#ifdef PF_INJECT
int launch_injected(void* stream, pf_message* message);
#endif

struct LaunchShape {
  dim3 grid;
  dim3 block;
  int64_t dynamic_shared_bytes = 0;
  bool shared_opt_in = false;  // whether more than 48 KiB may be asked for
};

inline int after_launch(int status, [[maybe_unused]] void* stream, [[maybe_unused]] pf_message* message) {
#ifdef PF_INJECT
  if (status == PF_OK) return launch_injected(stream, message);
#endif
  return status;
}

/// Launches `kernel` on `stream`. Neither allocates nor synchronises; a launch error is returned with
/// CUDA's name for it, and not left behind for the next caller.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), const LaunchShape& shape, [[maybe_unused]] void* stream,
           pf_message* message, Arguments... arguments) {
  std::tuple<Parameters...> values(arguments...);
#ifdef __CUDACC__
  const auto* function = reinterpret_cast<const void*>(kernel);
  cudaError_t error = cudaSuccess;
  if (shape.shared_opt_in) {
    error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shape.dynamic_shared_bytes));
  }
  if (error == cudaSuccess) {
    error = std::apply(
        [&](auto&... value) {
          void* addresses[] = {&value...};
          return cudaLaunchKernel(function, shape.grid, shape.block, addresses,
                                  static_cast<size_t>(shape.dynamic_shared_bytes),
                                  static_cast<cudaStream_t>(stream));
        },
        values);
  }
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    say(message, "{}: {} (grid {} x {} x {}, block {} x {} x {}, {} bytes of dynamic shared memory)",
        cudaGetErrorName(error), cudaGetErrorString(error), shape.grid.x, shape.grid.y, shape.grid.z,
        shape.block.x, shape.block.y, shape.block.z, shape.dynamic_shared_bytes);
    return PF_LAUNCH_FAILED;
  }
  return after_launch(PF_OK, stream, message);
#else
  if (host::active_grid != nullptr) {
    say(message, "the host emulation runs one launch at a time; another one is still running");
    return PF_LAUNCH_FAILED;
  }
  if (!host::launchable(shape.grid, shape.block, shape.dynamic_shared_bytes, shape.shared_opt_in, message)) {
    return PF_LAUNCH_FAILED;
  }
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...>& values;
  } call{kernel, values};
  host::Grid grid(
      shape.grid, shape.block,
      [](const void* closure) {
        const Call& made = *static_cast<const Call*>(closure);
        std::apply(made.kernel, made.values);
      },
      &call, message);
  host::active_grid = &grid;
  const int status = grid.run();
  host::active_grid = nullptr;
  return after_launch(status, stream, message);
#endif
}

/// How many CTAs of that many threads a grid-stride loop needs to fill the device; a few on the host.
inline int64_t resident_ctas([[maybe_unused]] int64_t threads_per_cta) {
#ifdef __CUDACC__
  static std::atomic<int> multiprocessors[64];  // by device; 0: not asked for yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return 1024;
  int count = multiprocessors[device].load(std::memory_order_relaxed);
  if (count == 0) {
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1024;
    multiprocessors[device].store(count, std::memory_order_relaxed);
  }
  const int64_t per_multiprocessor = 2048 / threads_per_cta < 32 ? 2048 / threads_per_cta : 32;
  return count * per_multiprocessor;
#else
  return 8;
#endif
}

}  // namespace pf
