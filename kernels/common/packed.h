// Several small elements in one wide load or store.
#pragma once

#include <cstring>

#include "common/target.h"

namespace pf {

/// `kCount` elements side by side, in registers once loops over them are unrolled.
template <class Element, int kCount>
class Packed {
 public:
  static constexpr int kBytes = static_cast<int>(sizeof(Element)) * kCount;

  Packed() = default;

  /// From the bytes of a vector of the same size.
  template <class Vector>
  __device__ __forceinline__ explicit Packed(const Vector& vector) {
    static_assert(sizeof(Vector) == kBytes);
    memcpy(elements_, &vector, kBytes);
  }

  template <class Vector>
  __device__ __forceinline__ Vector as() const {
    static_assert(sizeof(Vector) == kBytes);
    Vector vector;
    memcpy(&vector, elements_, kBytes);
    return vector;
  }

  __device__ __forceinline__ Element get(int index) const { return elements_[index]; }
  __device__ __forceinline__ void put(int index, Element element) { elements_[index] = element; }

 private:
  Element elements_[kCount];
};

}  // namespace pf
