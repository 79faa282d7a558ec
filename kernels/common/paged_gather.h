// What the kernels of gathers share beyond the row mapping: the table, the counters, and the walk over pages.
//
// `Args` is any args struct with the members that cp_gather_cache's has.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "common/row_map.h"
#include "common/vectors.h"

namespace pf {

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

inline constexpr int kGatherThreads = 256;

/// A CTA as large as a page can use, up to kGatherThreads: one row of threads (x) for one row of dst,
/// which takes so many steps.
template <class Args>
LaunchShape page_shape(const Args& a, int64_t steps_per_row) {
  const int64_t rows = std::min(a.page_size_tokens, a.num_tokens);
  const int64_t threads = power_of_two_at_least(steps_per_row * rows, 32, kGatherThreads);
  const int64_t threads_per_row = power_of_two_at_least(steps_per_row, 1, threads);
  const int64_t ctas = std::min(page_task_limit(a), resident_ctas(threads));
  return {.grid = dim3(static_cast<unsigned>(ctas)),
          .block = dim3(static_cast<unsigned>(threads_per_row), static_cast<unsigned>(threads / threads_per_row))};
}

}  // namespace pf
