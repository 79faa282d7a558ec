// Which rows, token positions and pages belong to a request: the row mapping that every gather shares.
#pragma once

#include "common/views.h"

namespace pf {

/// The rows of one request and where they come from. Half-open ranges.
struct RequestSpan {
  index64 row_begin;
  index64 position_begin;  // token positions in the request's paged sequence
  index64 position_end;
  index64 page_begin;  // logical pages that those positions touch
  index64 page_end;
  bool placed;  // false: seq_starts[r] < 0, and positions and pages above mean nothing

  __device__ __forceinline__ bool empty() const { return position_end <= position_begin; }
};

/// The mapped slots of one logical page.
struct PageSlice {
  index64 row_begin;
  index64 slot_begin;
  index64 token_count;
};

/// A task and the request it belongs to; tasks [task_begin, task_end) are that request's.
struct TaskOwner {
  index64 request;
  index64 task_begin;
  index64 task_end;
};

/// Request r's rows are [clamp(starts[r]), clamp(starts[r + 1])); its tasks, one a page, are numbered
/// [T(r), T(r + 1)) with T(r) = clamp(starts[r]) / page_size_tokens + 2 r. That is at least as many as the
/// pages it touches: L positions touch at most (L - 2) / page_size_tokens + 2 of them, however aligned.
///
/// T needs no prefix sum, and is increasing where starts do not decrease, so a binary search finds a
/// task's owner. Where starts decrease, let m be the least clamped start after the first decrease at k.
/// A task for a row below m belongs to some request r < k and has a number <= (m - 2) / size + 1 + 2 r,
/// which is less than T(i) for every i > k, since clamp(starts[i]) >= m there; up to k, T increases. So
/// the search still finds r for those tasks. Any other task finds some request or other, which is all
/// that the contract asks of the rows from m on.
template <int kStarts, int kSeqStarts>
struct RowMap {
  ReadView<int32_t, kStarts> starts;
  ReadView<int32_t, kSeqStarts> seq_starts;
  index64 num_requests;
  index64 num_tokens;
  index64 page_size_tokens;
  bool has_terminal;

  __device__ __forceinline__ index64 clamped(index64 start) const {
    return least(greatest(start, 0), num_tokens);
  }

  /// Where the rows of request `index` begin; index == num_requests: where those of the last end.
  __device__ __forceinline__ index64 row_boundary(index64 index) const {
    if (index == num_requests && !has_terminal) return num_tokens;
    return clamped(starts.load(index));
  }

  __device__ __forceinline__ index64 first_task(index64 request) const {
    return row_boundary(request) / page_size_tokens + request * 2;
  }

  /// `task` must lie in [first_task(0), first_task(num_requests)).
  __device__ __forceinline__ TaskOwner owner(index64 task, index64 first, index64 last) const {
    TaskOwner found{0, first, last};
    index64 above = num_requests;
    while (found.request + 1 < above) {
      const index64 middle = (found.request + above) / 2;
      const index64 middle_task = first_task(middle);
      if (middle_task <= task) {
        found.request = middle;
        found.task_begin = middle_task;
      } else {
        above = middle;
        found.task_end = middle_task;
      }
    }
    return found;
  }

  /// The last request whose rows begin at or before `row`, which must lie in [row_boundary(0),
  /// row_boundary(num_requests)). It claims the row; below m, see above, it is the only one.
  __device__ __forceinline__ index64 row_owner(index64 row) const {
    index64 request = 0;
    index64 above = num_requests;
    while (request + 1 < above) {
      const index64 middle = (request + above) / 2;
      if (row_boundary(middle) <= row) {
        request = middle;
      } else {
        above = middle;
      }
    }
    return request;
  }

  __device__ __forceinline__ RequestSpan span(index64 request) const {
    const index64 start = starts.load(request);
    const index64 row_begin = clamped(start);
    const index64 row_end = row_boundary(request + 1);
    const index64 seq_start = seq_starts.present() ? index64(seq_starts.load(request)) : index64(0);
    RequestSpan span;
    span.row_begin = row_begin;
    span.position_begin = seq_start + (row_begin - start);
    span.position_end = span.position_begin + (row_end - row_begin);
    span.placed = seq_start >= 0;
    span.page_begin = span.position_begin / page_size_tokens;
    span.page_end = span.empty() ? span.page_begin : (span.position_end - 1) / page_size_tokens + 1;
    return span;
  }

  __device__ __forceinline__ PageSlice slice(const RequestSpan& span, index64 page) const {
    const index64 page_position = page * page_size_tokens;
    const index64 begin = greatest(span.position_begin, page_position);
    const index64 end = least(span.position_end, page_position + page_size_tokens);
    return {span.row_begin + (begin - span.position_begin), begin - page_position, end - begin};
  }
};

}  // namespace pf
