// Touches one byte anywhere, as a faulty kernel would.
#include "common/launch.h"
#include "common/object.h"

extern "C" {
// pagefuzz-abi: begin
int pf_touch(void *at, int kind); /* kind: 0 reads it for nothing, 1 stores to it, 2 flips a bit of it */
// pagefuzz-abi: end
}

static __global__ void touch(volatile uint8_t* at, int kind) {
  if (kind == 0) {
    (void)*at;
  } else {
    *at = static_cast<uint8_t>(kind == 1 ? 0x5A : *at ^ 1);
  }
}

PF_EXPORT int pf_touch(void* at, int kind) {
  return pf::launch(touch, {dim3(1), dim3(1)}, nullptr, nullptr, static_cast<volatile uint8_t*>(at), kind);
}
