// The only way from a kernel to its arguments' memory.
//
// A view is a pointer. In the checked build each access is tested against the permissions of its buffer
// (pf_check_begin) at one-byte precision; a forbidden one is recorded with the line that made it and
// suppressed (a load gives 0). kBuffer is the position of the pf_array in the operation's args struct.
#pragma once

#include "common/index.h"

namespace pf {

namespace check {

#ifdef PF_CHECKED

// The one of the sorted, never adjacent intervals that holds [begin, begin + size); null if none does.
static __device__ const pf_interval* holder(const pf_interval* intervals, int64_t count, int64_t begin,
                                            int64_t size) {
  int64_t low = 0;
  int64_t high = count;
  while (low < high) {  // looks for the first interval that begins after `begin`
    const int64_t middle = low + (high - low) / 2;
    if (intervals[middle].begin <= begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const pf_interval* before = intervals + (low - 1);
  return low > 0 && begin < before->end && size <= before->end - begin ? before : nullptr;
}

// Not inlined: a kernel has many accesses.
static __device__ PF_OUTLINE bool searched_access(int buffer, int kind, const void* base, int64_t offset_bytes,
                                                  int32_t size_bytes, const char* file, int line) {
  const pf_permissions& allowed = state.permissions[buffer];
  const pf_interval* found = nullptr;
  if (kind != PF_WRITE) found = holder(allowed.read, allowed.read_count, offset_bytes, size_bytes);
  if (kind == PF_WRITE || (kind == PF_ATOMIC && found != nullptr)) {
    found = holder(allowed.write, allowed.write_count, offset_bytes, size_bytes);
  }
  if (found == nullptr) {
    record_access(buffer, kind, offset_bytes, size_bytes, file, line);
    return false;
  }
#ifdef __CUDACC__
  (void)base;  // a GPU traps by itself on an address that is not a multiple of the size; x86 would not
#else
  if (kind != PF_ATOMIC) state.last_hits[buffer][kind] = *found;
  if ((reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(offset_bytes)) % static_cast<unsigned>(size_bytes)) {
    host::misaligned(kind == PF_READ ? "read" : "write", size_bytes, buffer, offset_bytes, file, line);
    return false;
  }
#endif
  return true;
}

// Tests one access; false if it must not be made.
template <int kBuffer, int kKind, int kSizeBytes>
__device__ __forceinline__ bool access(const void* base, int64_t offset_bytes, const char* file, int line) {
  static_assert(kBuffer < kMaxBuffers);
  atomicAdd(&stripe().accesses, 1ull);
  atomicAdd(&stripe().accessed_bytes, static_cast<unsigned long long>(kSizeBytes));
#ifndef __CUDACC__
  const pf_interval& last = state.last_hits[kBuffer][kKind];
  const bool aligned = (reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(offset_bytes)) % kSizeBytes == 0;
  if (offset_bytes >= last.begin && offset_bytes <= last.end - kSizeBytes && aligned) [[likely]] return true;
#endif
  return searched_access(kBuffer, kKind, base, offset_bytes, kSizeBytes, file, line);
}

#endif  // PF_CHECKED

}  // namespace check

/// Read-only bytes; `Value` may be as wide as 16 bytes and must be aligned to its size.
template <int kBuffer>
class ReadBytes {
 public:
  explicit ReadBytes(const pf_array& array) : base_(static_cast<const char*>(array.data)) {}

  __device__ __forceinline__ bool present() const { return base_ != nullptr; }

  template <class Value>
  __device__ __forceinline__ Value load(index64 offset_bytes, [[maybe_unused]] int line = __builtin_LINE(),
                                        [[maybe_unused]] const char* file = __builtin_FILE()) const {
#ifdef PF_CHECKED
    const int64_t offset = offset_bytes.value();
    if (!check::access<kBuffer, PF_READ, sizeof(Value)>(base_, offset, file, line)) return Value{};
#else
    const int64_t offset = offset_bytes;
#endif
    return *reinterpret_cast<const Value*>(base_ + offset);
  }

 private:
  const char* base_;
};

/// Write-only bytes.
template <int kBuffer>
class WriteBytes {
 public:
  explicit WriteBytes(const pf_array& array) : base_(static_cast<char*>(array.data)) {}

  template <class Value>
  __device__ __forceinline__ void store(index64 offset_bytes, Value value,
                                        [[maybe_unused]] int line = __builtin_LINE(),
                                        [[maybe_unused]] const char* file = __builtin_FILE()) const {
#ifdef PF_CHECKED
    const int64_t offset = offset_bytes.value();
    if (!check::access<kBuffer, PF_WRITE, sizeof(Value)>(base_, offset, file, line)) return;
#else
    const int64_t offset = offset_bytes;
#endif
    *reinterpret_cast<Value*>(base_ + offset) = value;
  }

 private:
  char* base_;
};

/// Read-only elements, such as a table or an index vector.
template <class Element, int kBuffer>
class ReadView {
 public:
  explicit ReadView(const pf_array& array) : bytes_(array) {}

  __device__ __forceinline__ bool present() const { return bytes_.present(); }

  __device__ __forceinline__ Element load(index64 element, [[maybe_unused]] int line = __builtin_LINE(),
                                          [[maybe_unused]] const char* file = __builtin_FILE()) const {
#ifdef PF_CHECKED
    const index64 offset_bytes = index64(static_cast<int64_t>(sizeof(Element))) * Located<int64_t>(element, line, file);
#else
    const index64 offset_bytes = element * static_cast<int64_t>(sizeof(Element));
#endif
    return bytes_.template load<Element>(offset_bytes, line, file);
  }

 private:
  ReadBytes<kBuffer> bytes_;
};

/// int64 counters that are only ever added to.
template <int kBuffer>
class CounterView {
 public:
  explicit CounterView(const pf_array& array) : base_(static_cast<int64_t*>(array.data)) {}

  __device__ __forceinline__ bool present() const { return base_ != nullptr; }

  __device__ __forceinline__ void add(int element, index64 amount,
                                      [[maybe_unused]] int line = __builtin_LINE(),
                                      [[maybe_unused]] const char* file = __builtin_FILE()) const {
#ifdef PF_CHECKED
    const int64_t more = amount.value();
    if (!check::access<kBuffer, PF_ATOMIC, 8>(base_, int64_t{8} * element, file, line)) return;
#else
    const int64_t more = amount;
#endif
    atomicAdd(reinterpret_cast<unsigned long long*>(base_ + element),
              static_cast<unsigned long long>(more));
  }

 private:
  int64_t* base_;
};

}  // namespace pf
