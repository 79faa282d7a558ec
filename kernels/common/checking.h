// The record of a checked build: what was tested, and the first fault of each distinct site.
//
// On CUDA the state is one global of the module, written by pf_check_begin and read by pf_check_end;
// on the host it is a plain global. Recording is race-free: a site is claimed by compare-and-swap.
#pragma once

#include "common/target.h"

#ifdef PF_RECORDS

namespace pf::check {

inline constexpr int kMaxBuffers = 16;
inline constexpr int kStripes = 32;  // counters are spread, so that CTAs do not queue for one word

struct Stripe {
  unsigned long long accesses;
  unsigned long long accessed_bytes;
  unsigned long long operations;
  unsigned long long unused;
};

struct State {
  pf_permissions permissions[kMaxBuffers];
#ifndef __CUDACC__
  pf_interval last_hits[kMaxBuffers][3];  // by buffer and kind: most accesses fall where the last one did
#endif
  Stripe stripes[kStripes];
  unsigned long long faults;  // of both kinds: the source of `sequence`
  unsigned long long access_faults;
  unsigned long long index_faults;
  unsigned long long access_keys[PF_FAULTS_KEPT];  // 0: the slot is free
  unsigned long long index_keys[PF_FAULTS_KEPT];
  pf_access_fault kept_access[PF_FAULTS_KEPT];
  pf_index_fault kept_index[PF_FAULTS_KEPT];
};

#ifdef __CUDACC__
static __device__ State state;
#else
static State state;
#endif

__device__ __forceinline__ Stripe& stripe() { return state.stripes[blockIdx.x % kStripes]; }

__device__ inline const char* base_name(const char* path) {
  const char* name = path;
  for (; *path != '\0'; ++path) {
    if (*path == '/') name = path + 1;
  }
  return name;
}

__device__ inline unsigned long long mixed(unsigned long long hash, unsigned long long value) {
  return (hash ^ value) * 0x100000001B3ull;
}

// Never 0. Hashes the name itself: one file may have several addresses in an object.
__device__ inline unsigned long long site_key(const char* file, int line, int what, int which) {
  unsigned long long hash = 0xCBF29CE484222325ull;
  for (const char* letter = base_name(file); *letter != '\0'; ++letter) {
    hash = mixed(hash, static_cast<unsigned char>(*letter));
  }
  hash = mixed(mixed(mixed(hash, line), what + 1), which + 1);
  return hash | 1;
}

// The slot to fill, or -1 if the site is already in one or all are taken.
__device__ inline int claim(unsigned long long* keys, unsigned long long key) {
  for (int slot = 0; slot < PF_FAULTS_KEPT; ++slot) {
    const unsigned long long holder = atomicCAS(&keys[slot], 0ull, key);
    if (holder == 0) return slot;
    if (holder == key) return -1;
  }
  return -1;
}

__device__ inline void fill_site(pf_site& site, const char* file, int line) {
  const char* name = base_name(file);
  int length = 0;
  for (; name[length] != '\0' && length + 1 < static_cast<int>(sizeof(site.file)); ++length) {
    site.file[length] = name[length];
  }
  site.file[length] = '\0';
  site.line = line;
  site.block[0] = static_cast<int32_t>(blockIdx.x);
  site.block[1] = static_cast<int32_t>(blockIdx.y);
  site.block[2] = static_cast<int32_t>(blockIdx.z);
  site.thread[0] = static_cast<int32_t>(threadIdx.x);
  site.thread[1] = static_cast<int32_t>(threadIdx.y);
  site.thread[2] = static_cast<int32_t>(threadIdx.z);
}

__device__ PF_COLD inline void record_access(int buffer, int kind, int64_t offset_bytes,
                                             int32_t size_bytes, const char* file, int line) {
  atomicAdd(&state.access_faults, 1ull);
  const unsigned long long sequence = atomicAdd(&state.faults, 1ull) + 1;
  const int slot = claim(state.access_keys, site_key(file, line, buffer, kind));
  if (slot < 0) return;
  pf_access_fault& fault = state.kept_access[slot];
  fault.sequence = static_cast<int64_t>(sequence);
  fault.offset_bytes = offset_bytes;
  fault.size_bytes = size_bytes;
  fault.buffer = buffer;
  fault.kind = kind;
  fill_site(fault.site, file, line);
}

__device__ PF_COLD inline void record_index(int operation, int64_t a, int64_t b, int64_t result,
                                            int bits, bool is_signed, const char* file, int line) {
  atomicAdd(&state.index_faults, 1ull);
  const unsigned long long sequence = atomicAdd(&state.faults, 1ull) + 1;
  const int slot = claim(state.index_keys, site_key(file, line, operation, 0));
  if (slot < 0) return;
  pf_index_fault& fault = state.kept_index[slot];
  fault.sequence = static_cast<int64_t>(sequence);
  fault.a = a;
  fault.b = b;
  fault.result = result;
  fault.operation = operation;
  fault.bits = bits;
  fault.is_signed = is_signed ? 1 : 0;
  fill_site(fault.site, file, line);
}

// ---- host side of pf_check_begin and pf_check_end ---------------------------------------------------

template <class Fault>
inline int32_t sorted_faults(const unsigned long long* keys, const Fault* kept, Fault* out) {
  int32_t count = 0;
  for (int slot = 0; slot < PF_FAULTS_KEPT; ++slot) {
    if (keys[slot] == 0) continue;
    int32_t at = count++;
    for (; at > 0 && out[at - 1].sequence > kept[slot].sequence; --at) out[at] = out[at - 1];
    out[at] = kept[slot];
  }
  return count;
}

inline void summarise(const State& from, pf_check_record* record) {
  *record = pf_check_record{};
  for (const Stripe& part : from.stripes) {
    record->accesses += static_cast<int64_t>(part.accesses);
    record->accessed_bytes += static_cast<int64_t>(part.accessed_bytes);
    record->operations += static_cast<int64_t>(part.operations);
  }
  record->access_fault_count = static_cast<int64_t>(from.access_faults);
  record->index_fault_count = static_cast<int64_t>(from.index_faults);
  record->access_faults_kept =
      sorted_faults(from.access_keys, from.kept_access, record->access_faults);
  record->index_faults_kept =
      sorted_faults(from.index_keys, from.kept_index, record->index_faults);
}

}  // namespace pf::check

#endif  // PF_RECORDS
