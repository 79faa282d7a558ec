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

// Whether [begin, begin + size) lies in one of the sorted intervals, which are never adjacent.
__device__ __forceinline__ bool inside(const pf_interval* intervals, int64_t count, int64_t begin,
                                       int64_t size, int64_t* last_hit) {
  if (*last_hit < count) {
    const pf_interval last = intervals[*last_hit];
    if (begin >= last.begin && begin < last.end) return size <= last.end - begin;
  }
  int64_t low = 0;
  int64_t high = count;
  while (low < high) {  // the first interval that begins after `begin`
    const int64_t middle = low + (high - low) / 2;
    if (intervals[middle].begin <= begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0 || begin >= intervals[low - 1].end) return false;
  *last_hit = low - 1;
  return size <= intervals[low - 1].end - begin;
}

__device__ __forceinline__ bool permitted(int buffer, int kind, int64_t offset_bytes, int64_t size_bytes) {
  const pf_permissions& allowed = state.permissions[buffer];
#ifdef __CUDACC__
  int64_t nowhere[2] = {INT64_MAX, INT64_MAX};
  int64_t* last_hit = nowhere;
#else
  static int64_t last_hits[kMaxBuffers][2];
  int64_t* last_hit = last_hits[buffer];
#endif
  return (kind == PF_WRITE ||
          inside(allowed.read, allowed.read_count, offset_bytes, size_bytes, &last_hit[0])) &&
         (kind == PF_READ ||
          inside(allowed.write, allowed.write_count, offset_bytes, size_bytes, &last_hit[1]));
}

// Tests one access; false if it must not be made.
template <class Value>
__device__ __forceinline__ bool access(int buffer, int kind, const void* base, int64_t offset_bytes,
                                       const char* file, int line) {
  constexpr int32_t kSize = static_cast<int32_t>(sizeof(Value));
  atomicAdd(&stripe().accesses, 1ull);
  atomicAdd(&stripe().accessed_bytes, static_cast<unsigned long long>(kSize));
  if (!permitted(buffer, kind, offset_bytes, kSize)) [[unlikely]] {
    record_access(buffer, kind, offset_bytes, kSize, file, line);
    return false;
  }
#ifndef __CUDACC__
  // A GPU traps here by itself; x86 would not.
  const auto address = reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(offset_bytes);
  if (address % sizeof(Value) != 0) [[unlikely]] {
    host::misaligned(kind == PF_READ ? "read" : "write", kSize, buffer, offset_bytes, file, line);
    return false;
  }
#else
  (void)base;
#endif
  return true;
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
    if (!check::access<Value>(kBuffer, PF_READ, base_, offset, file, line)) return Value{};
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
    if (!check::access<Value>(kBuffer, PF_WRITE, base_, offset, file, line)) return;
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
    if (!check::access<int64_t>(kBuffer, PF_ATOMIC, base_, element * 8, file, line)) return;
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
