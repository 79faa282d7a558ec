// What the kernels of gathers share beyond the row mapping: the table, the counters, and the walk over pages.
//
// `Args` and `Buffer` ids are those of the operation; fields that all gathers have go by the same names.
#pragma once

#include <algorithm>

#include "common/refusals.h"
#include "common/row_map.h"

namespace pf {

// ---- launchers' side --------------------------------------------------------------------------------

/// The refusals that sizes give a reason for, the payload's own ones aside.
template <class Args>
bool acceptable_sizes(Refusals& refusals, const Args& a) {
  return refusals.struct_size(a.struct_bytes, sizeof(Args)) &&
         refusals.in_range("page_size_tokens", a.page_size_tokens, 1, 4096) &&
         refusals.count("num_requests", a.num_requests) && refusals.count("num_tokens", a.num_tokens) &&
         refusals.count("num_pages", a.num_pages) && refusals.count("table_width", a.table_width) &&
         refusals.in_range("has_terminal", a.has_terminal, 0, 1) &&
         refusals.require(a.num_tokens <= a.dst_rows, "num_tokens is {}, dst has only {} rows", a.num_tokens,
                          a.dst_rows);
}

/// Those of the index buffers: types, stride, extents, bases. Sizes must be acceptable.
template <class Args>
bool acceptable_index(Refusals& refusals, const Args& a) {
  const bool has_seq_starts = !absent(a.seq_starts);
  const bool has_counts = !absent(a.counts);
  const bool no_requests = a.num_requests == 0;
  const bool many_requests = a.num_requests > 1;
  const Extent table_rows = many_requests ? Extent(a.num_requests - 1) * a.table_row_stride : Extent(0);
  return refusals.rank("block_table", a.block_table, 2) && refusals.dtype("block_table", a.block_table, PF_I32) &&
         refusals.rank("starts", a.starts, 1) && refusals.dtype("starts", a.starts, PF_I32) &&
         (!has_seq_starts || (refusals.rank("seq_starts", a.seq_starts, 1) &&
                              refusals.dtype("seq_starts", a.seq_starts, PF_I32))) &&
         (!has_counts || (refusals.rank("counts", a.counts, 1) && refusals.dtype("counts", a.counts, PF_I64))) &&
         (!many_requests || refusals.stride("table_row_stride", a.table_row_stride, 1)) &&
         refusals.extent("block_table", a.block_table,
                         no_requests || a.table_width == 0 ? 0 : (table_rows + a.table_width) * 4) &&
         refusals.extent("starts", a.starts, no_requests ? 0 : (a.num_requests + a.has_terminal) * 4) &&
         (!has_seq_starts || refusals.extent("seq_starts", a.seq_starts, a.num_requests * 4)) &&
         (!has_counts || refusals.extent("counts", a.counts, 16)) && refusals.base("block_table", a.block_table, 4) &&
         refusals.base("starts", a.starts, 4) && refusals.base("seq_starts", a.seq_starts, 4) &&
         refusals.base("counts", a.counts, 8);
}

/// A destination may meet neither the index buffers nor the counters.
template <class Args>
bool disjoint_from_index(Refusals& refusals, const Args& a, const char* name, const pf_array& destination) {
  return refusals.disjoint(name, destination, "block_table", a.block_table) &&
         refusals.disjoint(name, destination, "starts", a.starts) &&
         refusals.disjoint(name, destination, "seq_starts", a.seq_starts) &&
         refusals.disjoint(name, destination, "counts", a.counts);
}

// ---- device side ------------------------------------------------------------------------------------

enum Counter : int { kPadding, kSkipped };

/// What every schedule of a gather gets beside its payload.
template <int kTable, int kStarts, int kSeqStarts, int kCounts>
struct PagedGather {
  ReadView<int32_t, kTable> block_table;
  RowMap<kStarts, kSeqStarts> map;
  CounterView<kCounts> counts;
  index64 num_pages;
  index64 table_width;
  index64 table_row_stride;

  template <class Args>
  static PagedGather of(const Args& a) {
    return {
        .block_table = ReadView<int32_t, kTable>(a.block_table),
        .map = {.starts = ReadView<int32_t, kStarts>(a.starts),
                .seq_starts = ReadView<int32_t, kSeqStarts>(a.seq_starts),
                .num_requests = a.num_requests,
                .num_tokens = a.num_tokens,
                .page_size_tokens = a.page_size_tokens,
                .has_terminal = a.has_terminal == 1},
        .counts = CounterView<kCounts>(a.counts),
        .num_pages = a.num_pages,
        .table_width = a.table_width,
        .table_row_stride = a.num_requests > 1 ? a.table_row_stride : 0,
    };
  }

  __device__ __forceinline__ void count(Counter which, index64 amount) const {
    if (counts.present()) counts.add(which, amount);
  }

  /// The physical page behind (request, page < table_width); -1 if there is none, which the thread that
  /// `counts_it` adds to the counters.
  __device__ __forceinline__ index64 physical_page(index64 request, index64 page, bool counts_it) const {
    const int32_t id = block_table.load(request * table_row_stride + page);
    if (id >= 0 && id < num_pages) return id;
    if (counts_it) count(id == -1 ? kPadding : kSkipped, 1);
    return -1;
  }

  /// Calls `copy(physical page, slice)` for this CTA's share of the logical pages: a task is one page of one
  /// request. Every thread finds the owner by itself: the loads are the same in all of them, and there is
  /// nothing to wait for.
  template <class Copy>
  __device__ __forceinline__ void for_each_page(bool is_first_thread, Copy copy) const {
    const index64 stride = gridDim.x;
    const index64 first = map.first_task(0);
    const index64 last = map.first_task(map.num_requests);
    index64 task = first + blockIdx.x;
    while (task < last) {
      const TaskOwner owner = map.owner(task, first, last);
      const RequestSpan span = map.span(owner.request);
      const index64 nth = task - owner.task_begin;
      const index64 page = span.page_begin + nth;
      const index64 readable_end = least(span.page_end, greatest(span.page_begin, table_width));
      if (span.empty() || !span.placed || page >= readable_end) {
        // Nothing to copy from here to the request's last task. The first such task counts for all.
        if (is_first_thread && !span.empty()) {
          if (!span.placed) {
            if (nth == 0) count(kSkipped, 1);
          } else if (page == readable_end && page < span.page_end) {
            count(kSkipped, span.page_end - page);
          }
        }
        task += (owner.task_end - task + stride - 1) / stride * stride;
        continue;
      }
      const index64 physical = physical_page(owner.request, page, is_first_thread);
      if (physical >= 0) copy(physical, map.slice(span, page));
      task += stride;
    }
  }
};

/// No request touches more pages than its share of this, see RowMap.
template <class Args>
int64_t page_task_limit(const Args& a) {
  return a.num_tokens / a.page_size_tokens + 2 * a.num_requests;
}

}  // namespace pf
