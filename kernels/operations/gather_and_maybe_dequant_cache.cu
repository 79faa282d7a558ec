// (b) gather_and_maybe_dequant_cache: copies cache entries through a block table, or dequantises them.

#include <algorithm>

#include "common/index_arguments.h"
#include "common/launch.h"
#include "common/moves.h"
#include "common/nesting.h"
#include "common/object.h"
#include "common/paged_gather.h"
#include "common/refusals.h"
#include "common/vectors.h"

extern "C" {
// pagefuzz-abi: begin

typedef struct pf_gather_and_maybe_dequant_cache_args {
  int64_t struct_bytes;      /* sizeof(pf_gather_and_maybe_dequant_cache_args) */
  pf_array src;              /* [num_pages, page_size_tokens, entry_elements]: rank 3; with fp8 e4m3, e5m2 or u8 */
  pf_array dst;              /* [dst_rows, entry_elements]: rank 2, f32, f16 or bf16 */
  pf_array block_table;      /* [num_requests, table_width] int32: rank 2 */
  pf_array starts;           /* [num_requests (+ 1 with has_terminal)] int32: rank 1 */
  pf_array seq_starts;       /* [num_requests] int32, optional: rank 1 */
  pf_array scale;            /* [1] f32, optional with kv_dtype auto: rank 1 */
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
  int64_t entry_elements;
  int64_t kv_dtype;          /* 0: auto, a copy; 1: fp8_e4m3; 2: fp8_e5m2 */
  int64_t dst_dtype;         /* enum pf_dtype: that of dst */
  int64_t has_terminal;      /* 0 or 1: starts[num_requests] is readable and ends the last request */
  void *stream;
} pf_gather_and_maybe_dequant_cache_args;

/* schedule: page
 * contains: yes
 * summary: one logical page at a time, table looked up once a page, wide loads and stores
 */
int pf_gather_and_maybe_dequant_cache_page(const pf_gather_and_maybe_dequant_cache_args *args, pf_message *message);

/* schedule: token
 * contains: yes
 * summary: one token a CTA of 64 threads, owner by binary search, element by element
 */
int pf_gather_and_maybe_dequant_cache_token(const pf_gather_and_maybe_dequant_cache_args *args, pf_message *message);

/* schedule: page-as-merged
 * contains: yes
 * faults: columns compared with the table's row stride instead of its width, page ids unchecked, nothing counted
 * summary: the page schedule as first published; unlike the raw copy's, it did have a guard of the table
 */
int pf_gather_and_maybe_dequant_cache_page_as_merged(const pf_gather_and_maybe_dequant_cache_args *args,
                                                     pf_message *message);

// pagefuzz-abi: end
}

// What a kernel does once a page: inlined, but in a checked build, where a compiler would take minutes.
#ifdef PF_CHECKED
#define PF_BODY PF_OUTLINE
#else
#define PF_BODY __forceinline__
#endif

namespace {

using Args = pf_gather_and_maybe_dequant_cache_args;
using pf::index32;
using pf::index64;

enum Buffer : int { kSrc, kDst, kBlockTable, kStarts, kSeqStarts, kScale, kCounts };

enum KvDtype : int { kAuto, kFp8E4M3, kFp8E5M2 };

// ---- launchers' side --------------------------------------------------------------------------------

int64_t dst_element_bytes(const Args& a) { return a.dst_dtype == PF_F32 ? 4 : 2; }
int64_t src_element_bytes(const Args& a) { return a.kv_dtype == kAuto ? dst_element_bytes(a) : 1; }
int64_t entry_bytes(const Args& a) { return a.entry_elements * src_element_bytes(a); }
int64_t row_bytes(const Args& a) { return a.entry_elements * dst_element_bytes(a); }

bool types_acceptable(const Args& a, pf::Refusals& refusals) {
  const bool has_scale = !pf::absent(a.scale);
  const int32_t codes = a.kv_dtype == kFp8E4M3 ? PF_E4M3 : PF_E5M2;
  return refusals.require(has_scale || a.kv_dtype == kAuto, "scale is null, kv_dtype {} needs one", a.kv_dtype) &&
         refusals.rank("src", a.src, 3) &&
         (a.kv_dtype == kAuto ? refusals.dtype("src", a.src, static_cast<int32_t>(a.dst_dtype))
                              : a.src.dtype == PF_U8 || refusals.dtype("src", a.src, codes)) &&
         refusals.rank("dst", a.dst, 2) && refusals.dtype("dst", a.dst, static_cast<int32_t>(a.dst_dtype)) &&
         refusals.optional_vector("scale", a.scale, PF_F32) &&
         pf::index_types_acceptable(a, refusals);
}

bool acceptable(const Args& a, pf_message* message) {
  pf::say(message, "");
  pf::Refusals refusals(message);

  const bool scalars =
      refusals.struct_size(a.struct_bytes, sizeof(Args)) &&
      refusals.in_range("entry_elements", a.entry_elements, 1, INT32_MAX) &&
      refusals.in_range("kv_dtype", a.kv_dtype, kAuto, kFp8E5M2) &&
      refusals.require(a.dst_dtype == PF_F32 || a.dst_dtype == PF_F16 || a.dst_dtype == PF_BF16,
                       "dst_dtype is {}, it must be that of f32, f16 or bf16", a.dst_dtype) &&
      pf::gather_sizes_acceptable(a, refusals) && pf::rows_acceptable("dst", a.dst_rows, a, refusals);
  if (!scalars || !types_acceptable(a, refusals)) return false;

  const bool strides =
      (a.num_requests <= 1 || refusals.stride("table_row_stride", a.table_row_stride, 1)) &&
      (a.num_pages <= 1 || refusals.stride("page_stride_bytes", a.page_stride_bytes, src_element_bytes(a))) &&
      (a.page_size_tokens <= 1 || refusals.stride("slot_stride_bytes", a.slot_stride_bytes, src_element_bytes(a))) &&
      (a.dst_rows <= 1 || pf::row_stride_acceptable("dst_row_stride_bytes", a.dst_row_stride_bytes,
                                                    dst_element_bytes(a), row_bytes(a), refusals));
  if (!strides) return false;

  const pf::Dimensions src = {{a.num_pages, a.page_stride_bytes}, {a.page_size_tokens, a.slot_stride_bytes}};
  const pf::Dimensions dst = {{a.num_tokens, a.dst_row_stride_bytes}};
  return refusals.extent("src", a.src, pf::extent_of(src, entry_bytes(a))) &&
         refusals.extent("dst", a.dst, pf::extent_of(dst, row_bytes(a))) &&
         refusals.optional_extent("scale", a.scale, 4) && refusals.base("src", a.src, src_element_bytes(a)) &&
         refusals.base("dst", a.dst, dst_element_bytes(a)) && refusals.base("scale", a.scale, 4) &&
         refusals.disjoint("dst", a.dst, "src", a.src) && refusals.disjoint("dst", a.dst, "scale", a.scale) &&
         pf::index_extents_acceptable(a, refusals) && pf::index_bases_acceptable(a, refusals) &&
         pf::index_disjoint("dst", a.dst, a, refusals);
}

bool nothing_to_do(const Args& a) { return a.num_tokens == 0 || a.num_requests == 0; }

// What every schedule's kernel gets. An entry is `steps` moves.
struct Gather {
  pf::ReadBytes<kSrc> src;
  pf::WriteBytes<kDst> dst;
  pf::PagedGather<kBlockTable, kStarts, kSeqStarts, kCounts> gather;
  pf::ReadView<float, kScale> scale;
  index64 page_stride_bytes;
  index64 slot_stride_bytes;
  index64 dst_row_stride_bytes;
  index64 steps;
  bool dense;  // neighbouring slots of a page are neighbouring rows of dst: one run
};

// Ignored strides get a value that keeps addresses aligned, and runs dense.
int64_t slot_stride_bytes(const Args& a) { return a.page_size_tokens > 1 ? a.slot_stride_bytes : entry_bytes(a); }
int64_t row_stride_bytes(const Args& a) { return a.dst_rows > 1 ? a.dst_row_stride_bytes : row_bytes(a); }
int64_t page_stride_bytes(const Args& a) { return a.num_pages > 1 ? a.page_stride_bytes : 0; }

Gather gather_of(const Args& a, int64_t elements_per_step) {
  return {
      .src = pf::ReadBytes<kSrc>(a.src),
      .dst = pf::WriteBytes<kDst>(a.dst),
      .gather = decltype(Gather::gather)::of(a),
      .scale = pf::ReadView<float, kScale>(a.scale),
      .page_stride_bytes = page_stride_bytes(a),
      .slot_stride_bytes = slot_stride_bytes(a),
      .dst_row_stride_bytes = row_stride_bytes(a),
      .steps = a.entry_elements / elements_per_step,
      .dense = slot_stride_bytes(a) == entry_bytes(a) && row_stride_bytes(a) == row_bytes(a),
  };
}

// How many elements one load and one store can move everywhere. Codes are dequantised as many at a time as
// fill a store of 16 bytes, or one by one.
int64_t elements_per_step(const Args& a) {
  const auto addresses_of = [](const pf_array& array, int64_t sums) {
    return static_cast<uint64_t>(sums) | reinterpret_cast<uintptr_t>(array.data);
  };
  const int64_t loaded = pf::widest_vector_bytes(
      addresses_of(a.src, page_stride_bytes(a) | slot_stride_bytes(a) | entry_bytes(a)));
  const int64_t stored = pf::widest_vector_bytes(addresses_of(a.dst, row_stride_bytes(a) | row_bytes(a)));
  const int64_t most = std::min(loaded / src_element_bytes(a), stored / dst_element_bytes(a));
  return a.kv_dtype == kAuto || most == 16 / dst_element_bytes(a) ? most : 1;
}

pf::LaunchShape page_shape(const Args& a) { return pf::page_shape(a, a.entry_elements / elements_per_step(a)); }

// ---- device side, shared by the schedules -----------------------------------------------------------

__device__ __forceinline__ bool first_thread() { return threadIdx.x == 0 && threadIdx.y == 0; }

// Makes `steps` moves by the threads of a row of `lanes`, of which this is `lane`.
template <class Move>
__device__ __forceinline__ void move_run(const Gather& g, const Move& move, index64 to, index64 from, index64 steps,
                                         index64 lane, index64 lanes) {
  for (index64 step = lane; step < steps; step += lanes) {
    move.move(g, to + step * Move::kDstBytes, from + step * Move::kSrcBytes);
  }
}

// Moves the slots of a page by the whole CTA.
template <class Move>
__device__ __forceinline__ void move_slots(const Gather& g, const Move& move, index64 to, index64 from,
                                           index64 token_count) {
  if (g.dense) {
    move_run(g, move, to, from, token_count * g.steps, threadIdx.y * blockDim.x + threadIdx.x,
             blockDim.x * blockDim.y);
    return;
  }
  for (index64 token = threadIdx.y; token < token_count; token += blockDim.y) {
    move_run(g, move, to + token * g.dst_row_stride_bytes, from + token * g.slot_stride_bytes, g.steps, threadIdx.x,
             blockDim.x);
  }
}

// ---- schedule: page ---------------------------------------------------------------------------------

// The slots that a task copies; none if token_count is 0.
struct PageWork {
  index64 to;
  index64 from;
  index64 token_count;
  index64 next_task;
};

// A task as in pf::PagedGather::for_each_page, which would be compiled anew for each move. The page id stays 32
// bits wide: a wider one costs some of the moves registers.
__device__ PF_BODY PageWork page_work(const Gather& g, index64 task, index64 first, index64 last) {
  const auto& map = g.gather.map;
  const index64 stride = gridDim.x;
  const pf::TaskOwner owner = map.owner(task, first, last);
  const pf::RequestSpan span = map.span(owner.request);
  const index64 nth = task - owner.task_begin;
  const index64 page = span.page_begin + nth;
  const index64 readable_end = pf::least(span.page_end, pf::greatest(span.page_begin, g.gather.table_width));
  if (span.empty() || !span.placed || page >= readable_end) {
    // Nothing to copy from here to the request's last task. The first such task counts for all.
    if (first_thread() && !span.empty()) {
      if (!span.placed) {
        if (nth == 0) g.gather.count(pf::kSkipped, 1);
      } else if (page == readable_end && page < span.page_end) {
        g.gather.count(pf::kSkipped, span.page_end - page);
      }
    }
    return {0, 0, 0, task + (owner.task_end - task + stride - 1) / stride * stride};
  }
  const int32_t physical = g.gather.block_table.load(owner.request * g.gather.table_row_stride + page);
  if (physical < 0 || physical >= g.gather.num_pages) {
    if (first_thread()) g.gather.count(physical == -1 ? pf::kPadding : pf::kSkipped, 1);
    return {0, 0, 0, task + stride};
  }
  const pf::PageSlice slice = map.slice(span, page);
  return {slice.row_begin * g.dst_row_stride_bytes,
          index64(physical) * g.page_stride_bytes + slice.slot_begin * g.slot_stride_bytes, slice.token_count,
          task + stride};
}

template <class Move>
__global__ void __launch_bounds__(pf::kGatherThreads) gather_pages(Gather g) {
  const Move move(g.scale);
  const auto& map = g.gather.map;
  const index64 first = map.first_task(0);
  const index64 last = map.first_task(map.num_requests);
  for (index64 task = first + blockIdx.x; task < last;) {
    const PageWork work = page_work(g, task, first, last);
    move_slots(g, move, work.to, work.from, work.token_count);
    task = work.next_task;
  }
}

// ---- schedule: token --------------------------------------------------------------------------------

// Where a row goes and comes from; `exists` is false if it comes from nowhere. The first row of a page
// counts for it.
struct RowWork {
  index64 to;
  index64 from;
  bool exists;
};

__device__ PF_BODY RowWork row_work(const Gather& g, index64 row) {
  const auto& map = g.gather.map;
  const index64 request = map.row_owner(row);
  const pf::RequestSpan span = map.span(request);
  const bool first_row = row == span.row_begin;
  if (!span.placed) {
    if (first_row && first_thread()) g.gather.count(pf::kSkipped, 1);
    return {0, 0, false};
  }
  const index64 position = span.position_begin + (row - span.row_begin);
  const index64 page = position / map.page_size_tokens;
  const index64 slot = position - page * map.page_size_tokens;
  const bool counts_page = first_thread() && (first_row || slot == 0);
  if (page >= g.gather.table_width) {
    if (counts_page) g.gather.count(pf::kSkipped, 1);
    return {0, 0, false};
  }
  const index64 physical = g.gather.physical_page(request, page, counts_page);
  if (physical < 0) return {0, 0, false};
  return {row * g.dst_row_stride_bytes, physical * g.page_stride_bytes + slot * g.slot_stride_bytes, true};
}

// A CTA takes one token after another, a thread an element.
template <class Move>
__global__ void __launch_bounds__(64) gather_tokens(Gather g) {
  const Move move(g.scale);
  const index64 end = g.gather.map.row_boundary(g.gather.map.num_requests);
  for (index64 row = g.gather.map.row_boundary(0) + blockIdx.x; row < end; row += gridDim.x) {
    const RowWork work = row_work(g, row);
    if (work.exists) move_run(g, move, work.to, work.from, g.steps, threadIdx.x, blockDim.x);
  }
}

// ---- schedule: page-as-merged -----------------------------------------------------------------------

// Faults kept on purpose: the logical page is compared with the table's row stride, which is its width only
// where the table is no slice of a wider one; page ids are compared with nothing, negative starts are not
// clamped, nothing is counted, positions and rows are 32 bits.
struct MergedTask {
  index32 row_begin;
  index32 slot_begin;
  index32 token_count;
  index32 physical_page;
  bool exists;
  bool readable;
};

__device__ PF_BODY MergedTask merged_task(const Gather& g, index64 table_pitch, index32 number) {
  const auto& map = g.gather.map;
  const index32 page_size = pf::narrow<index32>(map.page_size_tokens);
  const index32 num_tokens = pf::narrow<index32>(map.num_tokens);
  const index32 num_requests = pf::narrow<index32>(map.num_requests);
  MergedTask task;
  task.exists = false;
  task.readable = false;
  index32 ahead = number;  // pages to pass over
  for (index32 request = 0; request < num_requests; ++request) {
    const index32 row_begin = pf::least(index32(map.starts.load(request)), num_tokens);
    const bool ends_at_start = map.has_terminal || request + 1 < num_requests;
    const index32 row_end =
        ends_at_start ? pf::least(index32(map.starts.load(request + 1)), num_tokens) : num_tokens;
    const index32 row_count = pf::greatest(row_end - row_begin, 0);
    const index32 position = map.seq_starts.present() ? index32(map.seq_starts.load(request)) : index32(0);
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
      task.exists = true;
      task.readable = page < table_pitch;
      if (task.readable) task.physical_page = g.gather.block_table.load(request * g.gather.table_row_stride + page);
      return task;
    }
    ahead = ahead - page_count;
  }
  return task;
}

template <class Move>
__global__ void __launch_bounds__(pf::kGatherThreads) gather_pages_as_merged(Gather g, index64 table_pitch,
                                                                             index64 task_count) {
  __shared__ MergedTask task;
  const Move move(g.scale);
  for (index64 number = blockIdx.x; number < task_count; number += gridDim.x) {
    if (first_thread()) task = merged_task(g, table_pitch, pf::narrow<index32>(number));
    __syncthreads();
    if (!task.exists) return;
    if (task.readable) {
      const index64 from =
          index64(task.physical_page) * g.page_stride_bytes + index64(task.slot_begin) * g.slot_stride_bytes;
      move_slots(g, move, index64(task.row_begin) * g.dst_row_stride_bytes, from, task.token_count);
    }
    __syncthreads();  // before the first thread replaces the task
  }
}

// ---- launching --------------------------------------------------------------------------------------

template <class Format, class Choose>
auto by_result(const Args& a, int64_t elements, Choose choose) {
  using pf::Dequantise;
  switch (a.dst_dtype * 16 + elements) {
    case PF_F32 * 16 + 4: return choose(pf::Chosen<Dequantise<Format, pf::AsF32, 4>>{});
    case PF_F32 * 16 + 1: return choose(pf::Chosen<Dequantise<Format, pf::AsF32, 1>>{});
    case PF_F16 * 16 + 8: return choose(pf::Chosen<Dequantise<Format, pf::AsF16, 8>>{});
    case PF_F16 * 16 + 1: return choose(pf::Chosen<Dequantise<Format, pf::AsF16, 1>>{});
    case PF_BF16 * 16 + 8: return choose(pf::Chosen<Dequantise<Format, pf::AsBf16, 8>>{});
    default: return choose(pf::Chosen<Dequantise<Format, pf::AsBf16, 1>>{});
  }
}

// What `choose` returns for the move that takes so many elements at a time.
template <class Choose>
auto by_move(const Args& a, int64_t elements, Choose choose) {
  if (a.kv_dtype == kFp8E4M3) return by_result<pf::E4M3>(a, elements, choose);
  if (a.kv_dtype == kFp8E5M2) return by_result<pf::E5M2>(a, elements, choose);
  switch (elements * dst_element_bytes(a)) {
    case 16: return choose(pf::Chosen<pf::Copy<16>>{});
    case 8: return choose(pf::Chosen<pf::Copy<8>>{});
    case 4: return choose(pf::Chosen<pf::Copy<4>>{});
    default: return choose(pf::Chosen<pf::Copy<2>>{});
  }
}

// The same for one element at a time: wider moves, which it never takes, are not compiled.
template <class Choose>
auto by_element_move(const Args& a, Choose choose) {
  return by_move(a, 1, [&](auto chosen) {
    using Move = typename decltype(chosen)::type;
    return choose(pf::Chosen<std::conditional_t<(Move::kDstBytes <= 4), Move, pf::Copy<2>>>{});
  });
}

}  // namespace

PF_EXPORT int pf_gather_and_maybe_dequant_cache_page(const pf_gather_and_maybe_dequant_cache_args* args,
                                                     pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  if (nothing_to_do(*args)) return PF_OK;
  const int64_t elements = elements_per_step(*args);
  const auto kernel = by_move(*args, elements, [](auto move) { return gather_pages<typename decltype(move)::type>; });
  return pf::launch(kernel, page_shape(*args), args->stream, message, gather_of(*args, elements));
}

PF_EXPORT int pf_gather_and_maybe_dequant_cache_token(const pf_gather_and_maybe_dequant_cache_args* args,
                                                      pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  if (nothing_to_do(*args)) return PF_OK;
  const auto kernel = by_element_move(*args, [](auto move) { return gather_tokens<typename decltype(move)::type>; });
#ifdef __CUDACC__
  const int64_t ctas = args->num_tokens;
#else
  const int64_t ctas = std::min<int64_t>(args->num_tokens, 64);  // a CTA costs time even without a row
#endif
  const pf::LaunchShape shape = {.grid = dim3(static_cast<unsigned>(ctas)), .block = dim3(64)};
  return pf::launch(kernel, shape, args->stream, message, gather_of(*args, 1));
}

PF_EXPORT int pf_gather_and_maybe_dequant_cache_page_as_merged(const pf_gather_and_maybe_dequant_cache_args* args,
                                                               pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  if (nothing_to_do(*args)) return PF_OK;
  const int64_t elements = elements_per_step(*args);
  const auto kernel = by_move(*args, elements, [](auto move) {
    return gather_pages_as_merged<typename decltype(move)::type>;
  });
  const int64_t task_count = std::min<int64_t>(pf::page_task_limit(*args), INT32_MAX);
  const int64_t table_pitch = args->num_requests > 1 ? args->table_row_stride : args->table_width;
  return pf::launch(kernel, page_shape(*args), args->stream, message, gather_of(*args, elements), table_pitch,
                    task_count);
}
