// Widths of loads and stores.
#pragma once

#include "common/target.h"

namespace pf {

/// The widest load (16, 8, 4, 2 or 1 bytes) at which every address is a multiple of its width, given the
/// bitwise or of everything that addresses are sums of: bases, strides, sizes.
inline int widest_vector_bytes(uint64_t addresses_and_strides) {
  for (int bytes = 16; bytes > 1; bytes /= 2) {
    if (addresses_and_strides % static_cast<uint64_t>(bytes) == 0) return bytes;
  }
  return 1;
}

/// The type that moves that many bytes in one access.
template <int kBytes> struct VectorOf;
template <> struct VectorOf<1> { using type = uint8_t; };
template <> struct VectorOf<2> { using type = uint16_t; };
template <> struct VectorOf<4> { using type = uint32_t; };
template <> struct VectorOf<8> { using type = uint64_t; };
template <> struct VectorOf<16> { using type = uint4; };

/// What `choose` returns for the VectorOf that is `bytes` wide (16, 8, 4, 2 or 1).
template <class Choose>
auto by_vector_bytes(int bytes, Choose choose) {
  switch (bytes) {
    case 16: return choose(VectorOf<16>{});
    case 8: return choose(VectorOf<8>{});
    case 4: return choose(VectorOf<4>{});
    case 2: return choose(VectorOf<2>{});
    default: return choose(VectorOf<1>{});
  }
}

/// Least power of two that is >= value, within [low, high] (powers of two themselves).
inline int64_t power_of_two_at_least(int64_t value, int64_t low, int64_t high) {
  int64_t power = low;
  while (power < value && power < high) power *= 2;
  return power;
}

}  // namespace pf
