// One more access at the end of a launch, for objects that are built to show which layer of detection
// sees what. It goes to memory like any other access: through the checks of a checked build, and at
// full speed without them. Included once, by object.h.
#pragma once

#ifdef PF_INJECT

#include "common/launch.h"
#include "common/views.h"

namespace pf {

static pf_injection injected;  // size_bytes 0: nothing

template <class Value>
__device__ inline void touch_as(char* at, int kind) {
  if (kind == PF_READ) {
    (void)*reinterpret_cast<const volatile Value*>(at);  // the value is thrown away, the load is made
  } else {
    *reinterpret_cast<volatile Value*>(at) = static_cast<Value>(0x5A5A5A5A5A5A5A5Aull);
  }
}

static __global__ void touch(pf_injection one) {
#ifdef PF_CHECKED
  if (!check::searched_access(one.buffer, one.kind, one.data, one.offset_bytes, one.size_bytes, __FILE__, __LINE__)) {
    return;
  }
#endif
  char* at = static_cast<char*>(one.data) + one.offset_bytes;
  switch (one.size_bytes) {
    case 1: return touch_as<uint8_t>(at, one.kind);
    case 2: return touch_as<uint16_t>(at, one.kind);
    case 4: return touch_as<uint32_t>(at, one.kind);
    default: return touch_as<uint64_t>(at, one.kind);
  }
}

int launch_injected(void* stream, pf_message* message) {
  if (injected.size_bytes == 0) return PF_OK;
  const pf_injection one = injected;
  injected.size_bytes = 0;  // before the launch, which launches by the same function
  const int status = launch(touch, {dim3(1), dim3(1)}, stream, message, one);
  injected = one;
  return status;
}

}  // namespace pf

#endif
