// Extents of strided tensors, and whether their elements share bytes. Host code.
#pragma once

#include <algorithm>

#include "common/refusals.h"

namespace pf {

/// One dimension of a tensor. The stride of a dimension of size <= 1 is never looked at.
struct Dimension {
  int64_t size;
  int64_t stride_bytes;

  bool counts() const { return size > 1; }
  Extent reach() const { return counts() ? Extent(size - 1) * stride_bytes : Extent(0); }
};

/// Bytes from the first element's first to the last one's last; 0 if a size is 0.
template <int kCount>
Extent extent_of(const Dimension (&dimensions)[kCount], int64_t run_bytes) {
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
template <int kCount>
bool nests(const Dimension (&dimensions)[kCount], int64_t run_bytes) {
  Dimension sorted[kCount];
  std::copy(dimensions, dimensions + kCount, sorted);
  std::sort(sorted, sorted + kCount,
            [](const Dimension& a, const Dimension& b) { return a.stride_bytes < b.stride_bytes; });
  Extent inner(run_bytes);
  for (const Dimension& dimension : sorted) {
    if (!dimension.counts()) continue;
    if (!inner.valid() || dimension.stride_bytes < inner.value()) return false;
    inner = inner + dimension.reach();
  }
  return true;
}

}  // namespace pf
