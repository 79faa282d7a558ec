// -fsanitize=signed-integer-overflow without its runtime library: the compiler calls these, they fill the
// record with file, line and both operands, and the wrapped value goes on.
#pragma once

#ifdef PF_UBSAN

#include "common/checking.h"

namespace pf::host::ubsan {

// The layouts below are the compilers' interface to the sanitizer's runtime, the same in gcc and clang.
struct TypeDescriptor {
  uint16_t kind;  // 0: integer
  uint16_t info;  // bit 0: signed; the rest: log2 of the width in bits
  char name[1];
};

struct OverflowData {
  const char* file;
  uint32_t line;
  uint32_t column;
  const TypeDescriptor* type;
};

// An operand of up to 64 bits is passed in the pointer itself, wider ones behind it.
inline int64_t operand(const TypeDescriptor& type, void* handle) {
  const int bits = 1 << (type.info >> 1);
  const auto value = bits <= 64 ? reinterpret_cast<uintptr_t>(handle) : *static_cast<const uint64_t*>(handle);
  const int unused = bits >= 64 ? 0 : 64 - bits;
  return static_cast<int64_t>(value << unused) >> unused;
}

inline void record(int operation, const OverflowData& data, void* left, void* right) {
  const int bits = 1 << (data.type->info >> 1);
  const int64_t a = operand(*data.type, left);
  const int64_t b = right == nullptr && operation == PF_NEGATE ? 0 : operand(*data.type, right);
  const auto x = static_cast<uint64_t>(a);
  const auto y = static_cast<uint64_t>(b);
  uint64_t result = 0;
  switch (operation) {
    case PF_ADD: result = x + y; break;
    case PF_SUBTRACT: result = x - y; break;
    case PF_MULTIPLY: result = x * y; break;
    default: result = 0 - x; break;  // negation, and the one quotient that overflows: min / -1
  }
  const int unused = bits >= 64 ? 0 : 64 - bits;
  ++check::stripe().operations;
  check::record_index(operation, a, b, static_cast<int64_t>(result << unused) >> unused, bits, true,
                      data.file, static_cast<int>(data.line));
}

}  // namespace pf::host::ubsan

#define PF_UBSAN_HANDLER extern "C" __attribute__((visibility("hidden"), used)) void

PF_UBSAN_HANDLER __ubsan_handle_add_overflow(pf::host::ubsan::OverflowData* data, void* a, void* b) {
  pf::host::ubsan::record(PF_ADD, *data, a, b);
}
PF_UBSAN_HANDLER __ubsan_handle_sub_overflow(pf::host::ubsan::OverflowData* data, void* a, void* b) {
  pf::host::ubsan::record(PF_SUBTRACT, *data, a, b);
}
PF_UBSAN_HANDLER __ubsan_handle_mul_overflow(pf::host::ubsan::OverflowData* data, void* a, void* b) {
  pf::host::ubsan::record(PF_MULTIPLY, *data, a, b);
}
PF_UBSAN_HANDLER __ubsan_handle_negate_overflow(pf::host::ubsan::OverflowData* data, void* a) {
  pf::host::ubsan::record(PF_NEGATE, *data, a, nullptr);
}
PF_UBSAN_HANDLER __ubsan_handle_divrem_overflow(pf::host::ubsan::OverflowData* data, void* a, void* b) {
  pf::host::ubsan::record(PF_DIVIDE, *data, a, b);
}

#endif  // PF_UBSAN
