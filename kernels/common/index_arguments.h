// What every gather refuses of its sizes, table, vectors and counters. Host code; `Args` is any args struct
// with the members that cp_gather_cache's has.
#pragma once

#include "common/refusals.h"

namespace pf {

template <class Args>
bool gather_sizes_acceptable(const Args& a, Refusals& refusals) {
  return refusals.in_range("page_size_tokens", a.page_size_tokens, 1, 4096) &&
         refusals.count("num_requests", a.num_requests) && refusals.count("num_tokens", a.num_tokens) &&
         refusals.count("num_pages", a.num_pages) && refusals.count("table_width", a.table_width) &&
         refusals.in_range("has_terminal", a.has_terminal, 0, 1);
}

template <class Args>
bool index_types_acceptable(const Args& a, Refusals& refusals) {
  return refusals.rank("block_table", a.block_table, 2) && refusals.dtype("block_table", a.block_table, PF_I32) &&
         refusals.rank("starts", a.starts, 1) && refusals.dtype("starts", a.starts, PF_I32) &&
         (absent(a.seq_starts) || (refusals.rank("seq_starts", a.seq_starts, 1) &&
                                   refusals.dtype("seq_starts", a.seq_starts, PF_I32))) &&
         (absent(a.counts) || (refusals.rank("counts", a.counts, 1) && refusals.dtype("counts", a.counts, PF_I64)));
}

/// Extents and addresses; sizes and table_row_stride must be acceptable.
template <class Args>
bool index_memory_acceptable(const Args& a, Refusals& refusals) {
  const bool no_requests = a.num_requests == 0;
  const Extent table_rows = a.num_requests > 1 ? Extent(a.num_requests - 1) * a.table_row_stride : Extent(0);
  return refusals.extent("block_table", a.block_table,
                         no_requests || a.table_width == 0 ? 0 : (table_rows + a.table_width) * 4) &&
         refusals.extent("starts", a.starts, no_requests ? 0 : (a.num_requests + a.has_terminal) * 4) &&
         (absent(a.seq_starts) || refusals.extent("seq_starts", a.seq_starts, a.num_requests * 4)) &&
         (absent(a.counts) || refusals.extent("counts", a.counts, 16)) &&
         refusals.base("block_table", a.block_table, 4) && refusals.base("starts", a.starts, 4) &&
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
