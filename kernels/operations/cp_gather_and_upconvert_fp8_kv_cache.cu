// (c) cp_gather_and_upconvert_fp8_kv_cache: records of 656 bytes become rows of 576 bf16.
//
// A record: 512 E4M3 codes, 4 fp32 scales (one for each 128 codes), 64 raw values of 16 bits.

#include <algorithm>

#include "common/fp8.h"
#include "common/index_arguments.h"
#include "common/launch.h"
#include "common/nesting.h"
#include "common/object.h"
#include "common/packed.h"
#include "common/paged_gather.h"
#include "common/refusals.h"

extern "C" {
// pagefuzz-abi: begin

typedef struct pf_cp_gather_and_upconvert_fp8_kv_cache_args {
  int64_t struct_bytes;      /* sizeof(pf_cp_gather_and_upconvert_fp8_kv_cache_args) */
  pf_array src;              /* [num_pages, page_size_tokens, 656] u8: rank 3 */
  pf_array dst;              /* [dst_rows, 576] bf16: rank 2 */
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
  int64_t page_stride_bytes; /* at least 656, a multiple of 4 */
  int64_t slot_stride_bytes; /* at least 656, a multiple of 4 */
  int64_t dst_rows;
  int64_t dst_row_stride_bytes;
  int64_t has_terminal;      /* 0 or 1: starts[num_requests] is readable and ends the last request */
  void *stream;
} pf_cp_gather_and_upconvert_fp8_kv_cache_args;

/* schedule: page
 * contains: yes
 * summary: one logical page at a time, table looked up once a page, a warp a record, wide loads
 */
int pf_cp_gather_and_upconvert_fp8_kv_cache_page(const pf_cp_gather_and_upconvert_fp8_kv_cache_args *args,
                                                 pf_message *message);

/* schedule: token
 * contains: yes
 * summary: one warp per token, 8 warps a CTA, binary search over starts
 */
int pf_cp_gather_and_upconvert_fp8_kv_cache_token(const pf_cp_gather_and_upconvert_fp8_kv_cache_args *args,
                                                  pf_message *message);

/* schedule: page-as-merged
 * contains: yes
 * faults: no table-width guard, page ids unchecked (reported fault 2)
 * summary: the page schedule as first published, to reproduce the fault reported against it
 */
int pf_cp_gather_and_upconvert_fp8_kv_cache_page_as_merged(
    const pf_cp_gather_and_upconvert_fp8_kv_cache_args *args, pf_message *message);

// pagefuzz-abi: end
}

namespace {

using Args = pf_cp_gather_and_upconvert_fp8_kv_cache_args;
using pf::index32;
using pf::index64;

// Ids of the buffers: positions of the pf_arrays in Args.
enum Buffer : int { kSrc, kDst, kBlockTable, kStarts, kSeqStarts, kCounts };

constexpr int kCodes = 512;  // of a record: one byte each
constexpr int kCodesPerScale = 128;
constexpr int kScalesAt = kCodes;                                     // byte in a record
constexpr int kRopeAt = kScalesAt + kCodes / kCodesPerScale * 4;      // byte in a record
constexpr int kRopeBytes = 64 * 2;
constexpr int kRecordBytes = kRopeAt + kRopeBytes;
constexpr int kRowRopeAt = kCodes * 2;  // byte in a row
constexpr int kRowBytes = kRowRopeAt + kRopeBytes;
static_assert(kRecordBytes == 656 && kRowBytes == 1152);

constexpr int kLanes = 32;
constexpr int kWarps = 8;

// ---- launchers' side --------------------------------------------------------------------------------

// Of a page or a slot: both begin with a record.
bool record_stride_acceptable(pf::Name name, int64_t stride_bytes, pf::Refusals& refusals) {
  return refusals.stride(name, stride_bytes, 4) &&
         refusals.require(stride_bytes >= kRecordBytes, "{} is {}, below the {} bytes of a record", name, stride_bytes,
                          kRecordBytes);
}

bool acceptable(const Args& a, pf_message* message) {
  pf::say(message, "");
  pf::Refusals refusals(message);
  const bool scalars = refusals.struct_size(a.struct_bytes, sizeof(Args)) &&
                       pf::gather_sizes_acceptable(a, refusals) &&
                       pf::rows_acceptable("dst", a.dst_rows, a, refusals);
  if (!scalars) return false;

  const bool payload =
      refusals.rank("src", a.src, 3) && refusals.dtype("src", a.src, PF_U8) && refusals.rank("dst", a.dst, 2) &&
      refusals.dtype("dst", a.dst, PF_BF16) && pf::index_types_acceptable(a, refusals) &&
      (a.num_requests <= 1 || refusals.stride("table_row_stride", a.table_row_stride, 1)) &&
      (a.num_pages <= 1 || record_stride_acceptable("page_stride_bytes", a.page_stride_bytes, refusals)) &&
      (a.page_size_tokens <= 1 || record_stride_acceptable("slot_stride_bytes", a.slot_stride_bytes, refusals)) &&
      (a.dst_rows <= 1 ||
       pf::row_stride_acceptable("dst_row_stride_bytes", a.dst_row_stride_bytes, 2, kRowBytes, refusals));
  if (!payload) return false;

  const pf::Dimensions src = {{a.num_pages, a.page_stride_bytes}, {a.page_size_tokens, a.slot_stride_bytes}};
  const pf::Dimensions dst = {{a.num_tokens, a.dst_row_stride_bytes}};
  return refusals.extent("src", a.src, pf::extent_of(src, kRecordBytes)) &&
         refusals.extent("dst", a.dst, pf::extent_of(dst, kRowBytes)) && refusals.base("src", a.src, 4) &&
         refusals.base("dst", a.dst, 2) && pf::index_extents_acceptable(a, refusals) &&
         pf::index_bases_acceptable(a, refusals) && refusals.disjoint("dst", a.dst, "src", a.src) &&
         pf::index_disjoint("dst", a.dst, a, refusals);
}

bool nothing_to_do(const Args& a) { return a.num_tokens == 0 || a.num_requests == 0; }

// What every schedule's kernel gets.
struct Upconvert {
  pf::ReadBytes<kSrc> src;
  pf::WriteBytes<kDst> dst;
  pf::PagedGather<kBlockTable, kStarts, kSeqStarts, kCounts> gather;
  index64 page_stride_bytes;
  index64 slot_stride_bytes;
  index64 dst_row_stride_bytes;
};

// Ignored strides count as 0, which keeps every address aligned.
int64_t page_stride_bytes(const Args& a) { return a.num_pages > 1 ? a.page_stride_bytes : 0; }
int64_t slot_stride_bytes(const Args& a) { return a.page_size_tokens > 1 ? a.slot_stride_bytes : 0; }
int64_t row_stride_bytes(const Args& a) { return a.dst_rows > 1 ? a.dst_row_stride_bytes : 0; }

Upconvert upconvert_of(const Args& a) {
  return {
      .src = pf::ReadBytes<kSrc>(a.src),
      .dst = pf::WriteBytes<kDst>(a.dst),
      .gather = decltype(Upconvert::gather)::of(a),
      .page_stride_bytes = page_stride_bytes(a),
      .slot_stride_bytes = slot_stride_bytes(a),
      .dst_row_stride_bytes = row_stride_bytes(a),
  };
}

// How wide a lane loads codes and stores rows.
template <class LoadVector, class StoreVector>
struct Widths {
  using Load = LoadVector;
  using Store = StoreVector;
};

// What `choose` returns for the widest loads and stores that the addresses allow.
template <class Choose>
auto by_widths(const Args& a, Choose choose) {
  const uint64_t reads = reinterpret_cast<uintptr_t>(a.src.data) |
                         static_cast<uint64_t>(page_stride_bytes(a) | slot_stride_bytes(a));
  const uint64_t writes = reinterpret_cast<uintptr_t>(a.dst.data) | static_cast<uint64_t>(row_stride_bytes(a));
  if (reads % 8 == 0 && writes % 16 == 0) return choose(Widths<uint64_t, uint4>{});
  if (writes % 4 == 0) return choose(Widths<uint32_t, uint32_t>{});
  return choose(Widths<uint32_t, uint16_t>{});
}

constexpr unsigned kThreads = kLanes * kWarps;

pf::LaunchShape shape_of(int64_t units) {
  const int64_t ctas = std::min(units, pf::resident_ctas(kThreads));
  return {.grid = dim3(static_cast<unsigned>(ctas)), .block = dim3(kLanes, kWarps)};
}

// ---- device side, shared by the schedules -----------------------------------------------------------

__device__ __forceinline__ bool first_thread() { return threadIdx.x == 0 && threadIdx.y == 0; }

// bf16(fp32(code) * scale).
__device__ __forceinline__ uint16_t upconverted(uint8_t code, float scale) {
  return pf::bf16_of(pf::E4M3::decode(code) * scale);
}

// A warp (threadIdx.x is the lane) turns the record at byte `from` into the row at byte `to`.
template <class Widths>
__device__ __forceinline__ void upconvert_record(const Upconvert& g, index64 to, index64 from) {
  using Load = typename Widths::Load;
  using Store = typename Widths::Store;
  constexpr int kPerLane = sizeof(Load);
  constexpr int kPerStore = sizeof(Store) / 2;
  for (int first = static_cast<int>(threadIdx.x) * kPerLane; first < kCodes; first += kLanes * kPerLane) {
    const float scale = g.src.template load<float>(from + (kScalesAt + first / kCodesPerScale * 4));
    const pf::Packed<uint8_t, kPerLane> codes(g.src.template load<Load>(from + first));
    for (int part = 0; part < kPerLane; part += kPerStore) {
      pf::Packed<uint16_t, kPerStore> values;
      for (int i = 0; i < kPerStore; ++i) values.put(i, upconverted(codes.get(part + i), scale));
      g.dst.template store<Store>(to + 2 * (first + part), values.template as<Store>());
    }
  }
  using Rope = std::conditional_t<(sizeof(Store) < sizeof(Load)), Store, Load>;
  for (int at = static_cast<int>(threadIdx.x * sizeof(Rope)); at < kRopeBytes; at += kLanes * sizeof(Rope)) {
    g.dst.template store<Rope>(to + (kRowRopeAt + at), g.src.template load<Rope>(from + (kRopeAt + at)));
  }
}

// A CTA turns the mapped records of one page into rows, a warp a record.
template <class Widths>
__device__ __forceinline__ void upconvert_slice(const Upconvert& g, index64 physical, index64 row_begin,
                                                index64 slot_begin, index64 token_count) {
  const index64 from = physical * g.page_stride_bytes + slot_begin * g.slot_stride_bytes;
  const index64 to = row_begin * g.dst_row_stride_bytes;
  for (index64 token = threadIdx.y; token < token_count; token += kWarps) {
    upconvert_record<Widths>(g, to + token * g.dst_row_stride_bytes, from + token * g.slot_stride_bytes);
  }
}

// ---- schedule: page ---------------------------------------------------------------------------------

template <class Widths>
__global__ void __launch_bounds__(kThreads) upconvert_pages(Upconvert g) {
  g.gather.for_each_page(first_thread(), [&](index64 physical, const pf::PageSlice& slice) {
    upconvert_slice<Widths>(g, physical, slice.row_begin, slice.slot_begin, slice.token_count);
  });
}

// ---- schedule: token --------------------------------------------------------------------------------

// A warp has one row at a time.
template <class Widths>
__global__ void __launch_bounds__(kThreads) upconvert_tokens(Upconvert g) {
  const index64 page_size = g.gather.map.page_size_tokens;
  const index64 end = g.gather.map.row_boundary(g.gather.map.num_requests);
  const index64 step = index64(gridDim.x) * kWarps;
  const index64 warp = index64(blockIdx.x) * kWarps + threadIdx.y;
  for (index64 row = g.gather.map.row_boundary(0) + warp; row < end; row += step) {
    const index64 request = g.gather.map.row_owner(row);
    const pf::RequestSpan span = g.gather.map.span(request);
    const bool is_first_row = row == span.row_begin;
    const bool is_first_lane = threadIdx.x == 0;
    if (!span.placed) {
      if (is_first_lane && is_first_row) g.gather.count(pf::kSkipped, 1);
      continue;
    }
    const index64 position = span.position_begin + (row - span.row_begin);
    const index64 page = position / page_size;
    const index64 slot = position - page * page_size;
    const bool counts_page = is_first_lane && (is_first_row || slot == 0);  // its first row, once
    if (page >= g.gather.table_width) {
      if (counts_page) g.gather.count(pf::kSkipped, 1);
      continue;
    }
    const index64 physical = g.gather.physical_page(request, page, counts_page);
    if (physical < 0) continue;
    upconvert_record<Widths>(g, row * g.dst_row_stride_bytes,
                             physical * g.page_stride_bytes + slot * g.slot_stride_bytes);
  }
}

// ---- schedule: page-as-merged -----------------------------------------------------------------------

// Faults kept on purpose: nothing compares the logical page with the table's width or the page id with the
// number of pages, negative starts are not clamped, nothing is counted.
struct MergedTask {
  index32 row_begin;
  index32 slot_begin;
  index32 token_count;
  index32 physical_page;
  bool exists;
};

__device__ __forceinline__ MergedTask merged_task(const Upconvert& g, index32 number) {
  const auto& map = g.gather.map;
  const index32 page_size = pf::narrow<index32>(map.page_size_tokens);
  const index32 num_tokens = pf::narrow<index32>(map.num_tokens);
  const index32 num_requests = pf::narrow<index32>(map.num_requests);
  MergedTask task;
  task.exists = false;
  index32 ahead = number;  // pages to pass over
  for (index32 request = 0; request < num_requests; ++request) {
    const index32 row_begin = pf::least(index32(map.starts.load(request)), num_tokens);
    const bool ends_at_start = map.has_terminal || request + 1 < num_requests;
    const index32 row_end = ends_at_start ? pf::least(index32(map.starts.load(request + 1)), num_tokens) : num_tokens;
    const index32 row_count = pf::greatest(row_end - row_begin, 0);
    const index32 position = map.seq_starts.present() ? index32(map.seq_starts.load(request)) : index32(0);
    if (row_count == 0) continue;
    const index32 first_page = position / page_size;
    const index32 page_count = (position + row_count + page_size - 1) / page_size - first_page;
    if (ahead < page_count) {
      const index32 page = first_page + ahead;
      const index32 begin = pf::greatest(position, page * page_size);
      const index32 end = pf::least(position + row_count, (page + 1) * page_size);
      task.row_begin = row_begin + (begin - position);
      task.slot_begin = begin - page * page_size;
      task.token_count = end - begin;
      task.physical_page = g.gather.block_table.load(request * g.gather.table_row_stride + page);
      task.exists = true;
      return task;
    }
    ahead = ahead - page_count;
  }
  return task;
}

template <class Widths>
__global__ void __launch_bounds__(kThreads) upconvert_pages_as_merged(Upconvert g, index64 task_count) {
  __shared__ MergedTask task;
  for (index64 number = blockIdx.x; number < task_count; number += gridDim.x) {
    if (first_thread()) task = merged_task(g, pf::narrow<index32>(number));
    __syncthreads();
    if (!task.exists) return;
    upconvert_slice<Widths>(g, task.physical_page, task.row_begin, task.slot_begin, task.token_count);
    __syncthreads();  // before the first thread replaces the task
  }
}

}  // namespace

PF_EXPORT int pf_cp_gather_and_upconvert_fp8_kv_cache_page(const Args* args, pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  if (nothing_to_do(*args)) return PF_OK;
  const auto kernel = by_widths(*args, [](auto widths) { return upconvert_pages<decltype(widths)>; });
  return pf::launch(kernel, shape_of(pf::page_task_limit(*args)), args->stream, message, upconvert_of(*args));
}

PF_EXPORT int pf_cp_gather_and_upconvert_fp8_kv_cache_token(const Args* args, pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  if (nothing_to_do(*args)) return PF_OK;
  const auto kernel = by_widths(*args, [](auto widths) { return upconvert_tokens<decltype(widths)>; });
  const int64_t ctas = (args->num_tokens + kWarps - 1) / kWarps;
  return pf::launch(kernel, shape_of(ctas), args->stream, message, upconvert_of(*args));
}

PF_EXPORT int pf_cp_gather_and_upconvert_fp8_kv_cache_page_as_merged(const Args* args, pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  if (nothing_to_do(*args)) return PF_OK;
  const auto kernel = by_widths(*args, [](auto widths) { return upconvert_pages_as_merged<decltype(widths)>; });
  const int64_t task_count = std::min<int64_t>(pf::page_task_limit(*args), INT32_MAX);
  return pf::launch(kernel, shape_of(task_count), args->stream, message, upconvert_of(*args), task_count);
}
