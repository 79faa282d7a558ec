// (a) cp_gather_cache: raw copy of cache entries through a block table.
//
// As in every operation's file: the ABI fragment; what the launchers refuse; the struct that kernels get, all
// views and index types; device code shared by the schedules; one section a schedule; the launchers.

#include <algorithm>

#include "common/index_arguments.h"
#include "common/launch.h"
#include "common/nesting.h"
#include "common/object.h"
#include "common/paged_gather.h"
#include "common/refusals.h"
#include "common/vectors.h"

extern "C" {
// pagefuzz-abi: begin

typedef struct pf_cp_gather_cache_args {
  int64_t struct_bytes;      /* sizeof(pf_cp_gather_cache_args) */
  pf_array src;              /* [num_pages, page_size_tokens, entry]: rank 3, elements of element_bytes */
  pf_array dst;              /* [dst_rows, entry]: rank 2, dtype as src */
  pf_array block_table;      /* [num_requests, table_width] int32: rank 2 */
  pf_array starts;           /* [num_requests (+ 1 with has_terminal)] int32: rank 1 */
  pf_array seq_starts;       /* [num_requests] int32, optional: rank 1 */
  pf_array counts;           /* [2] int64 (padding, skipped), optional: rank 1 */
  int64_t num_requests;
  int64_t num_tokens;        /* rows the launch may write */
  int64_t page_size_tokens;
  int64_t num_pages;
  int64_t table_width;
  int64_t table_row_stride;  /* elements */
  int64_t page_stride_bytes;
  int64_t slot_stride_bytes;
  int64_t dst_rows;
  int64_t dst_row_stride_bytes;
  int64_t entry_bytes;
  int64_t element_bytes;     /* 1, 2, 4 or 8 */
  int64_t has_terminal;      /* 0 or 1: starts[num_requests] is readable and ends the last request */
  void *stream;
} pf_cp_gather_cache_args;

/* schedule: page
 * contains: yes
 * summary: one logical page at a time, table looked up once a page, wide copies
 */
int pf_cp_gather_cache_page(const pf_cp_gather_cache_args *args, pf_message *message);

/* schedule: token
 * contains: yes
 * summary: requests x splits, tokens walked serially, element by element
 */
int pf_cp_gather_cache_token(const pf_cp_gather_cache_args *args, pf_message *message);

/* schedule: page-as-merged
 * contains: yes
 * faults: no table-width guard, page ids unchecked, row * entry_bytes in int32 (reported faults 1 and 3)
 * summary: the page schedule as first published, to reproduce the faults reported against it
 */
int pf_cp_gather_cache_page_as_merged(const pf_cp_gather_cache_args *args, pf_message *message);

// pagefuzz-abi: end
}

namespace {

using Args = pf_cp_gather_cache_args;
using pf::Counter;
using pf::index32;
using pf::index64;
using pf::kPadding;
using pf::kSkipped;

// Ids of the buffers: positions of the pf_arrays in Args.
enum Buffer : int { kSrc, kDst, kBlockTable, kStarts, kSeqStarts, kCounts };

// ---- launchers' side --------------------------------------------------------------------------------

bool acceptable(const Args& a, pf_message* message) {
  pf::say(message, "");
  pf::Refusals refusals(message);

  const bool scalars =
      refusals.struct_size(a.struct_bytes, sizeof(Args)) &&
      refusals.element_bytes(a.element_bytes) &&
      refusals.require(a.entry_bytes > 0 && a.entry_bytes % a.element_bytes == 0,
                       "entry_bytes is {}, it must be a positive multiple of element_bytes = {}", a.entry_bytes,
                       a.element_bytes) &&
      pf::gather_sizes_acceptable(a, refusals) && pf::rows_acceptable("dst", a.dst_rows, a, refusals);
  if (!scalars) return false;

  const bool types = refusals.rank("src", a.src, 3) && refusals.element_size("src", a.src, a.element_bytes) &&
                     refusals.rank("dst", a.dst, 2) && refusals.dtype("dst", a.dst, a.src.dtype) &&
                     pf::index_types_acceptable(a, refusals);
  if (!types) return false;

  const bool strides =
      (a.num_requests <= 1 || refusals.stride("table_row_stride", a.table_row_stride, 1)) &&
      (a.num_pages <= 1 || refusals.stride("page_stride_bytes", a.page_stride_bytes, a.element_bytes)) &&
      (a.page_size_tokens <= 1 || refusals.stride("slot_stride_bytes", a.slot_stride_bytes, a.element_bytes)) &&
      (a.dst_rows <= 1 || pf::row_stride_acceptable("dst_row_stride_bytes", a.dst_row_stride_bytes, a.element_bytes,
                                                    a.entry_bytes, refusals));
  if (!strides) return false;

  const pf::Dimensions src = {{a.num_pages, a.page_stride_bytes}, {a.page_size_tokens, a.slot_stride_bytes}};
  const pf::Dimensions dst = {{a.num_tokens, a.dst_row_stride_bytes}};
  return refusals.extent("src", a.src, pf::extent_of(src, a.entry_bytes)) &&
         refusals.extent("dst", a.dst, pf::extent_of(dst, a.entry_bytes)) &&
         pf::index_extents_acceptable(a, refusals) && refusals.base("src", a.src, a.element_bytes) &&
         refusals.base("dst", a.dst, a.element_bytes) && pf::index_bases_acceptable(a, refusals) &&
         refusals.disjoint("dst", a.dst, "src", a.src) && pf::index_disjoint("dst", a.dst, a, refusals);
}

bool nothing_to_do(const Args& a) { return a.num_tokens == 0 || a.num_requests == 0; }

// What every schedule's kernel gets.
struct Gather {
  pf::ReadBytes<kSrc> src;
  pf::WriteBytes<kDst> dst;
  pf::ReadView<int32_t, kBlockTable> block_table;
  pf::RowMap<kStarts, kSeqStarts> map;
  pf::CounterView<kCounts> counts;
  index64 num_pages;
  index64 table_width;
  index64 table_row_stride;
  index64 page_stride_bytes;
  index64 slot_stride_bytes;
  index64 dst_row_stride_bytes;
  index64 entry_bytes;
  bool dense;  // neighbouring slots of a page are neighbouring rows of dst: one run of bytes
};

// Ignored strides get a value that keeps addresses aligned, and runs dense.
int64_t slot_stride_bytes(const Args& a) { return a.page_size_tokens > 1 ? a.slot_stride_bytes : a.entry_bytes; }
int64_t row_stride_bytes(const Args& a) { return a.dst_rows > 1 ? a.dst_row_stride_bytes : a.entry_bytes; }
int64_t page_stride_bytes(const Args& a) { return a.num_pages > 1 ? a.page_stride_bytes : 0; }

Gather gather_of(const Args& a) {
  return {
      .src = pf::ReadBytes<kSrc>(a.src),
      .dst = pf::WriteBytes<kDst>(a.dst),
      .block_table = pf::ReadView<int32_t, kBlockTable>(a.block_table),
      .map = {.starts = pf::ReadView<int32_t, kStarts>(a.starts),
              .seq_starts = pf::ReadView<int32_t, kSeqStarts>(a.seq_starts),
              .num_requests = a.num_requests,
              .num_tokens = a.num_tokens,
              .page_size_tokens = a.page_size_tokens,
              .has_terminal = a.has_terminal == 1},
      .counts = pf::CounterView<kCounts>(a.counts),
      .num_pages = a.num_pages,
      .table_width = a.table_width,
      .table_row_stride = a.num_requests > 1 ? a.table_row_stride : 0,
      .page_stride_bytes = page_stride_bytes(a),
      .slot_stride_bytes = slot_stride_bytes(a),
      .dst_row_stride_bytes = row_stride_bytes(a),
      .entry_bytes = a.entry_bytes,
      .dense = slot_stride_bytes(a) == a.entry_bytes && row_stride_bytes(a) == a.entry_bytes,
  };
}

int vector_bytes(const Args& a) {
  const int64_t addends = page_stride_bytes(a) | slot_stride_bytes(a) | row_stride_bytes(a) | a.entry_bytes;
  return pf::widest_vector_bytes(static_cast<uint64_t>(addends) | reinterpret_cast<uintptr_t>(a.src.data) |
                                 reinterpret_cast<uintptr_t>(a.dst.data));
}

pf::LaunchShape page_shape(const Args& a) { return pf::page_shape(a, a.entry_bytes / vector_bytes(a)); }

// ---- device side, shared by the schedules -----------------------------------------------------------

__device__ __forceinline__ bool first_thread() { return threadIdx.x == 0 && threadIdx.y == 0; }

__device__ __forceinline__ void count(const Gather& g, Counter which, index64 amount) {
  if (g.counts.present()) g.counts.add(which, amount);
}

// The physical page behind (request, page < table_width); -1, counted by one thread, if there is none.
__device__ __forceinline__ index64 physical_page(const Gather& g, index64 request, index64 page) {
  const int32_t id = g.block_table.load(request * g.table_row_stride + page);
  if (id >= 0 && id < g.num_pages) return id;
  if (first_thread()) count(g, id == -1 ? kPadding : kSkipped, 1);
  return -1;
}

// Copies `bytes` bytes by the threads of a row of `lanes`, of which this is `lane`.
template <class Vector>
__device__ __forceinline__ void copy_run(const Gather& g, index64 to, index64 from, index64 bytes, index64 lane,
                                         index64 lanes) {
  constexpr int64_t kVectorBytes = sizeof(Vector);
  const index64 step = lanes * kVectorBytes;
  for (index64 at = lane * kVectorBytes; at < bytes; at += step) {
    g.dst.store<Vector>(to + at, g.src.load<Vector>(from + at));
  }
}

template <class Vector>
__device__ __forceinline__ void copy_rows(const Gather& g, index64 to, index64 from, index64 token_count) {
  for (index64 token = threadIdx.y; token < token_count; token += blockDim.y) {
    copy_run<Vector>(g, to + token * g.dst_row_stride_bytes, from + token * g.slot_stride_bytes, g.entry_bytes,
                     threadIdx.x, blockDim.x);
  }
}

template <class Vector>
__device__ __forceinline__ void copy_dense(const Gather& g, index64 to, index64 from, index64 token_count) {
  copy_run<Vector>(g, to, from, token_count * g.entry_bytes, threadIdx.y * blockDim.x + threadIdx.x,
                   blockDim.x * blockDim.y);
}

// ---- schedule: page ---------------------------------------------------------------------------------

// A task is one logical page of one request. Every thread finds the owner by itself: the loads are the
// same in all of them, and there is nothing to wait for.
template <class Vector>
__global__ void __launch_bounds__(pf::kGatherThreads) gather_pages(Gather g) {
  const index64 stride = gridDim.x;
  const index64 first = g.map.first_task(0);
  const index64 last = g.map.first_task(g.map.num_requests);
  index64 task = first + blockIdx.x;
  while (task < last) {
    const pf::TaskOwner owner = g.map.owner(task, first, last);
    const pf::RequestSpan span = g.map.span(owner.request);
    const index64 nth = task - owner.task_begin;
    const index64 page = span.page_begin + nth;
    const index64 readable_end = pf::least(span.page_end, pf::greatest(span.page_begin, g.table_width));
    if (span.empty() || !span.placed || page >= readable_end) {
      // Nothing to copy from here to the request's last task. The first such task counts for all.
      if (first_thread() && !span.empty()) {
        if (!span.placed) {
          if (nth == 0) count(g, kSkipped, 1);
        } else if (page == readable_end && page < span.page_end) {
          count(g, kSkipped, span.page_end - page);
        }
      }
      task += (owner.task_end - task + stride - 1) / stride * stride;
      continue;
    }
    const index64 physical = physical_page(g, owner.request, page);
    if (physical >= 0) {
      const pf::PageSlice slice = g.map.slice(span, page);
      const index64 from = physical * g.page_stride_bytes + slice.slot_begin * g.slot_stride_bytes;
      const index64 to = slice.row_begin * g.dst_row_stride_bytes;
      if (g.dense) {
        copy_dense<Vector>(g, to, from, slice.token_count);
      } else {
        copy_rows<Vector>(g, to, from, slice.token_count);
      }
    }
    task += stride;
  }
}

// ---- schedule: token --------------------------------------------------------------------------------

// A CTA has one request and one share of its pages, and walks their tokens one after another, a thread
// an element.
template <class Element>
__global__ void __launch_bounds__(1024) gather_tokens(Gather g) {
  if (!first_thread() && index64(threadIdx.x) * static_cast<int64_t>(sizeof(Element)) >= g.entry_bytes) return;
  const index64 request = blockIdx.x;
  const index64 split = blockIdx.y;
  const index64 splits = gridDim.y;
  const bool counts_request = first_thread() && split == 0;
  const pf::RequestSpan span = g.map.span(request);
  if (span.empty()) return;
  if (!span.placed) {
    if (counts_request) count(g, kSkipped, 1);
    return;
  }
  const index64 readable_end = pf::least(span.page_end, pf::greatest(span.page_begin, g.table_width));
  if (counts_request && readable_end < span.page_end) count(g, kSkipped, span.page_end - readable_end);

  const index64 share = (readable_end - span.page_begin + splits - 1) / splits;
  const index64 share_begin = span.page_begin + split * share;
  const index64 share_end = pf::least(share_begin + share, readable_end);
  for (index64 page = share_begin; page < share_end; ++page) {
    const index64 physical = physical_page(g, request, page);
    if (physical < 0) continue;
    const pf::PageSlice slice = g.map.slice(span, page);
    for (index64 token = 0; token < slice.token_count; ++token) {
      const index64 slot = slice.slot_begin + token;
      copy_run<Element>(g, (slice.row_begin + token) * g.dst_row_stride_bytes,
                        physical * g.page_stride_bytes + slot * g.slot_stride_bytes, g.entry_bytes, threadIdx.x,
                        blockDim.x);
    }
  }
}

// ---- schedule: page-as-merged -----------------------------------------------------------------------

// Faults kept on purpose: nothing compares the logical page with the table's width or the page id with the
// number of pages, negative starts are not clamped, nothing is counted, and a dense copy multiplies its
// row by the entry size in 32 bits. One is left out, as it would hide the first: as published, a request
// without rows that begins inside a page still looked that page up, to copy nothing.
struct MergedTask {
  index32 row_begin;
  index32 slot_begin;
  index32 token_count;
  index32 physical_page;
  bool exists;
};

__device__ __forceinline__ MergedTask merged_task(const Gather& g, index32 number) {
  const index32 page_size = pf::narrow<index32>(g.map.page_size_tokens);
  const index32 num_tokens = pf::narrow<index32>(g.map.num_tokens);
  const index32 num_requests = pf::narrow<index32>(g.map.num_requests);
  MergedTask task;
  task.exists = false;
  index32 ahead = number;  // pages to pass over
  for (index32 request = 0; request < num_requests; ++request) {
    const index32 row_begin = pf::least(index32(g.map.starts.load(request)), num_tokens);
    const bool ends_at_start = g.map.has_terminal || request + 1 < num_requests;
    const index32 row_end =
        ends_at_start ? pf::least(index32(g.map.starts.load(request + 1)), num_tokens) : num_tokens;
    const index32 row_count = pf::greatest(row_end - row_begin, 0);
    const index32 position = g.map.seq_starts.present() ? index32(g.map.seq_starts.load(request)) : index32(0);
    const index32 first_page = position / page_size;
    if (row_count == 0) continue;
    const index32 page_count = (position + row_count + page_size - 1) / page_size - first_page;
    if (ahead < page_count) {
      const index32 page = first_page + ahead;
      const index32 page_position = page * page_size;
      const index32 begin = pf::greatest(position, page_position);
      const index32 end = pf::least(position + row_count, page_position + page_size);
      task.row_begin = row_begin + (begin - position);
      task.slot_begin = begin - page_position;
      task.token_count = end - begin;
      task.physical_page = g.block_table.load(request * g.table_row_stride + page);
      task.exists = true;
      return task;
    }
    ahead = ahead - page_count;
  }
  return task;
}

template <class Vector>
__global__ void __launch_bounds__(pf::kGatherThreads) gather_pages_as_merged(Gather g, index64 task_count) {
  __shared__ MergedTask task;
  for (index64 number = blockIdx.x; number < task_count; number += gridDim.x) {
    if (first_thread()) task = merged_task(g, pf::narrow<index32>(number));
    __syncthreads();
    if (!task.exists) return;
    const index64 from = task.physical_page * g.page_stride_bytes + task.slot_begin * g.slot_stride_bytes;
    if (g.dense) {
      const index32 to = task.row_begin * pf::narrow<index32>(g.entry_bytes);
      copy_dense<Vector>(g, to, from, task.token_count);
    } else {
      copy_rows<Vector>(g, task.row_begin * g.dst_row_stride_bytes, from, task.token_count);
    }
    __syncthreads();  // before the first thread replaces the task
  }
}

}  // namespace

PF_EXPORT int pf_cp_gather_cache_page(const pf_cp_gather_cache_args* args, pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  if (nothing_to_do(*args)) return PF_OK;
  const auto kernel = pf::by_vector_bytes(vector_bytes(*args), [](auto vector) {
    return gather_pages<typename decltype(vector)::type>;
  });
  return pf::launch(kernel, page_shape(*args), args->stream, message, gather_of(*args));
}

PF_EXPORT int pf_cp_gather_cache_token(const pf_cp_gather_cache_args* args, pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  if (nothing_to_do(*args)) return PF_OK;
  const auto kernel = pf::by_vector_bytes(static_cast<int>(args->element_bytes), [](auto element) {
    return gather_tokens<typename decltype(element)::type>;
  });
  const unsigned splits = args->num_requests <= 64 ? 16 : args->num_requests <= 128 ? 4 : 2;
  const pf::LaunchShape shape = {.grid = dim3(static_cast<unsigned>(args->num_requests), splits), .block = dim3(1024)};
  return pf::launch(kernel, shape, args->stream, message, gather_of(*args));
}

PF_EXPORT int pf_cp_gather_cache_page_as_merged(const pf_cp_gather_cache_args* args, pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  if (nothing_to_do(*args)) return PF_OK;
  const auto kernel = pf::by_vector_bytes(vector_bytes(*args), [](auto vector) {
    return gather_pages_as_merged<typename decltype(vector)::type>;
  });
  const int64_t task_count = std::min<int64_t>(pf::page_task_limit(*args), INT32_MAX);
  return pf::launch(kernel, page_shape(*args), args->stream, message, gather_of(*args), task_count);
}
