// Extents of strided tensors, and whether their elements share bytes. Host code.
#pragma once

#include <initializer_list>

#include "common/refusals.h"

namespace pf {

/// One dimension of a tensor. The stride of a dimension of size <= 1 is never looked at.
struct Dimension {
  int64_t size;
  int64_t stride_bytes;

  bool counts() const { return size > 1; }
  Extent reach() const { return counts() ? Extent(size - 1) * stride_bytes : Extent(0); }
};

/// A stride as kernels get it: one that is never looked at becomes 0, which is aligned to anything.
inline int64_t counted(int64_t stride, int64_t size) { return size > 1 ? stride : 0; }

using Dimensions = std::initializer_list<Dimension>;

/// Bytes from the first element's first to the last one's last; 0 if a size is 0.
inline Extent extent_of(Dimensions dimensions, int64_t run_bytes) {
  Extent total(run_bytes);
  bool empty = false;
  for (const Dimension& dimension : dimensions) {
    total = total + dimension.reach();
    empty = empty || dimension.size == 0;
  }
  return empty ? Extent(0) : total;
}

/// Sorted by stride, each stride is at least the extent of all smaller ones together: no byte belongs to
/// two elements.
inline bool nests(Dimensions dimensions, int64_t run_bytes) {
  for (const Dimension& outer : dimensions) {
    if (!outer.counts()) continue;
    Extent inside(run_bytes);
    for (const Dimension& inner : dimensions) {
      const bool is_smaller = inner.stride_bytes < outer.stride_bytes ||
                              (inner.stride_bytes == outer.stride_bytes && &inner < &outer);
      if (inner.counts() && is_smaller) inside = inside + inner.reach();
    }
    if (!inside.valid() || outer.stride_bytes < inside.value()) return false;
  }
  return true;
}

}  // namespace pf
