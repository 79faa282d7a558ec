// pf_scan: finds which chunks of device memory hold anything but one byte value. Not an operation: it
// serves the harness, and reads memory directly.
#pragma once

#include "common/launch.h"

#ifdef __CUDACC__

namespace pf::scan {

inline constexpr int kThreads = 256;

// One chunk a CTA and turn. Words of 16 bytes where the address allows; chunk_bytes is a multiple of 16.
static __global__ void mark_chunks(const uint8_t* data, int64_t size_bytes, int64_t chunk_bytes, uint32_t value,
                                   uint8_t* flags) {
  const uint32_t word = value * 0x01010101u;
  const bool wide = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  const int64_t chunks = (size_bytes + chunk_bytes - 1) / chunk_bytes;
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int64_t begin = chunk * chunk_bytes;
    const int64_t end = size_bytes - begin < chunk_bytes ? size_bytes : begin + chunk_bytes;
    const int64_t wide_end = wide ? begin + (end - begin) / 16 * 16 : begin;
    bool differs = false;
    for (int64_t at = begin + threadIdx.x * 16; at < wide_end; at += kThreads * 16) {
      const uint4 words = *reinterpret_cast<const uint4*>(data + at);
      differs |= words.x != word || words.y != word || words.z != word || words.w != word;
    }
    for (int64_t at = wide_end + threadIdx.x; at < end; at += kThreads) differs |= data[at] != value;
    const int any = __syncthreads_or(differs);
    if (threadIdx.x == 0) flags[chunk] = any != 0;
  }
}

}  // namespace pf::scan

#endif

PF_EXPORT int pf_scan(const void* data, int64_t size_bytes, int64_t chunk_bytes, int32_t value, uint8_t* flags,
                      void* stream) {
#ifdef __CUDACC__
  if (size_bytes < 0 || chunk_bytes <= 0 || chunk_bytes % 16 != 0 || value < 0 || value > 255) return PF_REFUSED;
  if (size_bytes == 0) return PF_OK;
  const int64_t chunks = (size_bytes - 1) / chunk_bytes + 1;
  const int64_t ctas = std::min(chunks, pf::resident_ctas(pf::scan::kThreads));
  return pf::launch(pf::scan::mark_chunks, {dim3(static_cast<unsigned>(ctas)), dim3(pf::scan::kThreads)}, stream,
                    nullptr, static_cast<const uint8_t*>(data), size_bytes, chunk_bytes,
                    static_cast<uint32_t>(value), flags);
#else
  (void)data;
  (void)size_bytes;
  (void)chunk_bytes;
  (void)value;
  (void)flags;
  (void)stream;
  return PF_REFUSED;
#endif
}
