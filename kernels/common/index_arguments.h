// What every gather refuses of its sizes, rows, table, vectors and counters. Host code; `Args` is any args struct
// with the members that cp_gather_cache's has.
#pragma once

#include "common/nesting.h"
#include "common/refusals.h"

namespace pf {

/// What lies between the page size and `has_terminal` in the order of refusals.
template <class Args>
bool index_sizes_acceptable(const Args& a, Refusals& refusals) {
  return refusals.count("num_requests", a.num_requests) && refusals.count("num_tokens", a.num_tokens) &&
         refusals.count("num_pages", a.num_pages) && refusals.count("table_width", a.table_width) &&
         refusals.in_range("has_terminal", a.has_terminal, 0, 1);
}

template <class Args>
bool gather_sizes_acceptable(const Args& a, Refusals& refusals) {
  return refusals.page_size(a.page_size_tokens) && index_sizes_acceptable(a, refusals);
}

/// The rows that a launch may write are rows of the destination.
template <class Args>
bool rows_acceptable(const char* name, int64_t rows, const Args& a, Refusals& refusals) {
  return refusals.require(a.num_tokens <= rows, "num_tokens is {}, {} has only {} rows", a.num_tokens, name, rows);
}

/// No two rows of a destination share a byte, written ones or others.
inline bool row_stride_acceptable(const char* name, int64_t stride_bytes, int64_t unit, int64_t row_bytes,
                                  Refusals& refusals) {
  return refusals.stride(name, stride_bytes, unit) &&
         refusals.require(stride_bytes >= row_bytes, "{} is {}: rows of {} bytes would overlap", name, stride_bytes,
                          row_bytes);
}

template <class Args>
bool index_types_acceptable(const Args& a, Refusals& refusals) {
  return refusals.rank("block_table", a.block_table, 2) && refusals.dtype("block_table", a.block_table, PF_I32) &&
         refusals.vector("starts", a.starts, PF_I32) && refusals.optional_vector("seq_starts", a.seq_starts, PF_I32) &&
         refusals.optional_vector("counts", a.counts, PF_I64);
}

/// Sizes and table_row_stride must be acceptable.
template <class Args>
bool index_extents_acceptable(const Args& a, Refusals& refusals) {
  const Dimensions table_rows = {{a.num_requests, a.table_row_stride}};  // in elements
  return refusals.extent("block_table", a.block_table,
                         a.table_width == 0 ? 0 : extent_of(table_rows, a.table_width) * 4) &&
         refusals.extent("starts", a.starts, a.num_requests == 0 ? 0 : (a.num_requests + a.has_terminal) * 4) &&
         refusals.optional_extent("seq_starts", a.seq_starts, a.num_requests * 4) &&
         refusals.optional_extent("counts", a.counts, 16);
}

template <class Args>
bool index_bases_acceptable(const Args& a, Refusals& refusals) {
  return refusals.base("block_table", a.block_table, 4) && refusals.base("starts", a.starts, 4) &&
         refusals.base("seq_starts", a.seq_starts, 4) && refusals.base("counts", a.counts, 8);
}

/// A destination meets none of them.
template <class Args>
bool index_disjoint(const char* name, const pf_array& destination, const Args& a, Refusals& refusals) {
  return refusals.disjoint(name, destination, "block_table", a.block_table) &&
         refusals.disjoint(name, destination, "starts", a.starts) &&
         refusals.disjoint(name, destination, "seq_starts", a.seq_starts) &&
         refusals.disjoint(name, destination, "counts", a.counts);
}

}  // namespace pf
