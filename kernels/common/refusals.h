// What a launcher refuses before anything is launched: one sentence each. Host code.
//
// Every check returns whether the arguments may still be good, so that an operation chains its list with
// &&; the first check that fails writes the message.
#pragma once

#include "common/message.h"

namespace pf {

/// A size in bytes or elements; invalid once a step of its computation left int64 or became negative.
class Extent {
 public:
  Extent(int64_t value) : value_(value), valid_(value >= 0) {}

  bool valid() const { return valid_; }
  int64_t value() const { return value_; }

  friend Extent operator+(Extent a, Extent b) {
    Extent sum(0);
    sum.valid_ = !__builtin_add_overflow(a.value_, b.value_, &sum.value_) && a.valid_ && b.valid_;
    return sum;
  }
  friend Extent operator*(Extent a, Extent b) {
    Extent product(0);
    product.valid_ = !__builtin_mul_overflow(a.value_, b.value_, &product.value_) && a.valid_ && b.valid_;
    return product;
  }

 private:
  int64_t value_;
  bool valid_;
};

/// Size of one element of a dtype code; 0 if the code is unknown.
inline int64_t dtype_bytes(int32_t dtype) {
  switch (dtype) {
    case PF_U8: case PF_E4M3: case PF_E5M2: return 1;
    case PF_U16: case PF_F16: case PF_BF16: return 2;
    case PF_U32: case PF_I32: case PF_F32: return 4;
    case PF_U64: case PF_I64: return 8;
    default: return 0;
  }
}

inline const char* dtype_name(int32_t dtype) {
  static const char* const kNames[] = {"?",  "u8",   "u16", "u32",  "u64", "i32",
                                       "i64", "f16", "bf16", "f32", "e4m3", "e5m2"};
  return dtype >= PF_U8 && dtype <= PF_E5M2 ? kNames[dtype] : "an unknown dtype";
}

/// An optional buffer that was not passed.
inline bool absent(const pf_array& array) { return array.data == nullptr && array.extent_bytes == 0; }

class Refusals {
 public:
  explicit Refusals(pf_message* message) : message_(message) {}

  template <class... Arguments>
  bool require(bool holds, const char* otherwise, Arguments... arguments) {
    if (!holds) say(message_, otherwise, arguments...);
    return holds;
  }

  bool struct_size(int64_t got, size_t want) {
    return require(got == static_cast<int64_t>(want),
                   "struct_bytes is {}, but the args struct of this object has {} bytes", got, want);
  }

  bool in_range(const char* name, int64_t value, int64_t low, int64_t high) {
    return require(value >= low && value <= high, "{} is {}, it must lie in {}..{}", name, value, low, high);
  }

  /// A number of requests, tokens, pages or columns.
  bool count(const char* name, int64_t value) { return in_range(name, value, 0, INT32_MAX); }

  bool rank(const char* name, const pf_array& array, int32_t want) {
    return require(array.rank == want, "{} has rank {}, it must have rank {}", name, array.rank, want);
  }

  bool dtype(const char* name, const pf_array& array, int32_t want) {
    return require(array.dtype == want, "{} is {} (code {}), it must be {}", name, dtype_name(array.dtype),
                   array.dtype, dtype_name(want));
  }

  bool element_size(const char* name, const pf_array& array, int64_t element_bytes) {
    return require(dtype_bytes(array.dtype) == element_bytes, "{} is {} (code {}), not a dtype of {} bytes", name,
                   dtype_name(array.dtype), array.dtype, element_bytes);
  }

  bool element_bytes(int64_t value) {
    return require(value == 1 || value == 2 || value == 4 || value == 8, "element_bytes is {}, it must be 1, 2, 4 or 8",
                   value);
  }

  bool page_size(int64_t tokens) { return in_range("page_size_tokens", tokens, 1, 4096); }

  bool vector(const char* name, const pf_array& array, int32_t want_dtype) {
    return rank(name, array, 1) && dtype(name, array, want_dtype);
  }

  bool optional_vector(const char* name, const pf_array& array, int32_t want_dtype) {
    return absent(array) || vector(name, array, want_dtype);
  }

  /// Null only if empty; aligned.
  bool base(const char* name, const pf_array& array, int64_t alignment) {
    return require(array.data != nullptr || array.extent_bytes == 0,
                   "{} is a null pointer with an extent of {} bytes; it must point to them", name,
                   array.extent_bytes) &&
           require(reinterpret_cast<uintptr_t>(array.data) % static_cast<uintptr_t>(alignment) == 0,
                   "the address of {} is not a multiple of {} bytes", name, alignment);
  }

  /// A stride that counts: not negative, a multiple of `unit`.
  bool stride(const char* name, int64_t stride, int64_t unit) {
    return require(stride >= 0, "{} is {}, it must not be negative", name, stride) &&
           require(stride % unit == 0, "{} is {}, it must be a multiple of {}", name, stride, unit);
  }

  bool extent(const char* name, const pf_array& array, Extent needed) {
    return require(needed.valid(), "sizes and strides of {} need more bytes than an int64 can count", name) &&
           require(array.extent_bytes >= needed.value(),
                   "{} has an extent of {} bytes, its sizes and strides need {}", name, array.extent_bytes,
                   needed.value());
  }

  bool optional_extent(const char* name, const pf_array& array, Extent needed) {
    return absent(array) || extent(name, array, needed);
  }

  /// [a, a + extent) and [b, b + extent) share no byte.
  bool disjoint(const char* name, const pf_array& array, const char* other_name, const pf_array& other) {
    const auto a = reinterpret_cast<uintptr_t>(array.data);
    const auto b = reinterpret_cast<uintptr_t>(other.data);
    const auto a_bytes = static_cast<uintptr_t>(array.extent_bytes);
    const auto b_bytes = static_cast<uintptr_t>(other.extent_bytes);
    const bool meet = a_bytes > 0 && b_bytes > 0 && (a <= b ? b - a < a_bytes : a - b < b_bytes);
    return require(!meet, "the memory of {} overlaps that of {}, which the launch must not change", name,
                   other_name);
  }

 private:
  pf_message* message_;
};

}  // namespace pf
