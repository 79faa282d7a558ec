// One deliberate fault for each tool of compute-sanitizer. A tool that does not report its own was not watching, and
// what it did not report of other kernels says nothing. Not an operation: it serves the harness.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

enum Tool { kMemcheck = 0, kRacecheck = 1, kInitcheck = 2, kSynccheck = 3 };

constexpr int kThreads = 64;

__global__ void read_past_the_end(int32_t* memory, int32_t words) {
  volatile int32_t* seen = memory;
  memory[0] = seen[words];
}

// The words were allocated and nobody has written them.
__global__ void read_unwritten(int32_t* memory, int32_t words) {
  volatile int32_t* seen = memory;
  memory[0] = seen[words - 1];
}

// Two warps write and read one word of shared memory, with no barrier in between.
__global__ void race(int32_t* memory) {
  __shared__ volatile int32_t word;
  if (threadIdx.x == 0) word = 1;
  memory[threadIdx.x] = word;
}

// A lane waits with others at a barrier of which it is no part: a mask that leaves it out. (What a barrier of the block
// does that some threads never reach is not fixed from sm_70 on: the hardware counts those that have ended.)
__global__ void leave_out(int32_t* memory) {
  const unsigned first_half = __ballot_sync(0xffffffffu, threadIdx.x < 16);
  if (threadIdx.x <= 16) {
    memory[threadIdx.x] = int32_t(first_half);
    __syncwarp(first_half);
  }
}

}  // namespace

// memory holds `words` words, 64 or more, in an allocation that ends there and was never written.
// Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int pf_canary(int32_t tool, void* memory, int32_t words) {
  auto* data = static_cast<int32_t*>(memory);
  if (words < kThreads) return cudaErrorInvalidValue;
  switch (tool) {
    case kMemcheck:
      read_past_the_end<<<1, 1>>>(data, words);
      break;
    case kRacecheck:
      race<<<1, kThreads>>>(data);
      break;
    case kInitcheck:
      read_unwritten<<<1, 1>>>(data, words);
      break;
    case kSynccheck:
      leave_out<<<1, 32>>>(data);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}
