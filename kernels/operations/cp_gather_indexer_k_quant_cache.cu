// (d) cp_gather_indexer_k_quant_cache: raw copy of quantised keys and their scales through a block table.
//
// As in every operation's file: the ABI fragment; what the launchers refuse; the struct that kernels get, all
// views and index types; device code shared by the schedules; one section a schedule; the launchers.

#include <algorithm>

#include "common/index_arguments.h"
#include "common/indexer_pages.h"
#include "common/launch.h"
#include "common/nesting.h"
#include "common/object.h"
#include "common/paged_gather.h"
#include "common/refusals.h"
#include "common/vectors.h"

extern "C" {
// pagefuzz-abi: begin

typedef struct pf_cp_gather_indexer_k_quant_cache_args {
  int64_t struct_bytes;      /* sizeof(pf_cp_gather_indexer_k_quant_cache_args) */
  pf_array src;              /* [num_pages, page_size_tokens, head_dim + 4 * groups] u8: rank 3; of a page all
                                key bytes come first, then all scales */
  pf_array dst_k;            /* [dst_k_rows, head_dim] u8, e4m3 or e5m2: rank 2 */
  pf_array dst_scale;        /* [dst_scale_rows, groups] f32, groups = head_dim / quant_block: rank 2 */
  pf_array block_table;      /* [num_requests, table_width] int32: rank 2 */
  pf_array starts;           /* [num_requests (+ 1 with has_terminal)] int32: rank 1 */
  pf_array seq_starts;       /* [num_requests] int32, optional: rank 1 */
  pf_array counts;           /* [2] int64 (padding, skipped), optional: rank 1 */
  int64_t num_requests;
  int64_t num_tokens;        /* rows the launch may write */
  int64_t page_size_tokens;  /* a multiple of 16 with page_layout 1 */
  int64_t num_pages;
  int64_t table_width;
  int64_t table_row_stride;  /* elements */
  int64_t page_stride_bytes; /* a multiple of 4, at least page_size_tokens * (head_dim + 4 * groups) */
  int64_t dst_k_rows;
  int64_t dst_k_row_stride_bytes;
  int64_t dst_scale_rows;
  int64_t dst_scale_row_stride_bytes; /* a multiple of 4 */
  int64_t head_dim;          /* key bytes of a token: a multiple of 16, up to 1024 */
  int64_t quant_block;       /* key bytes that share a scale: divides head_dim */
  int64_t page_layout;       /* 0: flat; 1: tiles of 16 tokens x 16 bytes */
  int64_t has_terminal;      /* 0 or 1: starts[num_requests] is readable and ends the last request */
  void *stream;
} pf_cp_gather_indexer_k_quant_cache_args;

/* schedule: page
 * contains: yes
 * summary: one logical page at a time, table looked up once a page, wide copies
 */
int pf_cp_gather_indexer_k_quant_cache_page(const pf_cp_gather_indexer_k_quant_cache_args *args,
                                            pf_message *message);

/* schedule: token
 * contains: yes
 * summary: one token per thread group, binary search over starts
 */
int pf_cp_gather_indexer_k_quant_cache_token(const pf_cp_gather_indexer_k_quant_cache_args *args,
                                             pf_message *message);

// pagefuzz-abi: end
}

namespace {

using Args = pf_cp_gather_indexer_k_quant_cache_args;
using pf::index32;
using pf::index64;

// Ids of the buffers: positions of the pf_arrays in Args.
enum Buffer : int { kSrc, kDstK, kDstScale, kBlockTable, kStarts, kSeqStarts, kCounts };

constexpr int64_t kScaleBytes = 4;
constexpr int kThreads = 256;

// ---- launchers' side --------------------------------------------------------------------------------

int64_t scale_bytes(const Args& a) { return a.head_dim / a.quant_block * kScaleBytes; }

bool acceptable(const Args& a, pf_message* message) {
  pf::say(message, "");
  pf::Refusals refusals(message);

  const bool scalars =
      refusals.struct_size(a.struct_bytes, sizeof(Args)) &&
      pf::indexer_key_acceptable(a, refusals) && pf::indexer_page_acceptable(a, refusals) &&
      pf::index_sizes_acceptable(a, refusals) && pf::rows_acceptable("dst_k", a.dst_k_rows, a, refusals) &&
      pf::rows_acceptable("dst_scale", a.dst_scale_rows, a, refusals);
  if (!scalars) return false;

  const bool types =
      refusals.rank("src", a.src, 3) && refusals.dtype("src", a.src, PF_U8) &&
      refusals.rank("dst_k", a.dst_k, 2) && refusals.element_size("dst_k", a.dst_k, 1) &&
      refusals.rank("dst_scale", a.dst_scale, 2) && refusals.dtype("dst_scale", a.dst_scale, PF_F32) &&
      pf::index_types_acceptable(a, refusals);
  if (!types) return false;

  const int64_t page_bytes = a.page_size_tokens * (a.head_dim + scale_bytes(a));
  const bool strides =
      (a.num_requests <= 1 || refusals.stride("table_row_stride", a.table_row_stride, 1)) &&
      pf::indexer_page_stride_acceptable(a, page_bytes, refusals) &&
      (a.dst_k_rows <= 1 ||
       pf::row_stride_acceptable("dst_k_row_stride_bytes", a.dst_k_row_stride_bytes, 1, a.head_dim, refusals)) &&
      (a.dst_scale_rows <= 1 ||
       pf::row_stride_acceptable("dst_scale_row_stride_bytes", a.dst_scale_row_stride_bytes, kScaleBytes,
                                 scale_bytes(a), refusals));
  if (!strides) return false;

  const pf::Dimensions src = {{a.num_pages, a.page_stride_bytes}};
  const pf::Dimensions dst_k = {{a.num_tokens, a.dst_k_row_stride_bytes}};
  const pf::Dimensions dst_scale = {{a.num_tokens, a.dst_scale_row_stride_bytes}};
  return refusals.extent("src", a.src, pf::extent_of(src, page_bytes)) &&
         refusals.extent("dst_k", a.dst_k, pf::extent_of(dst_k, a.head_dim)) &&
         refusals.extent("dst_scale", a.dst_scale, pf::extent_of(dst_scale, scale_bytes(a))) &&
         pf::index_extents_acceptable(a, refusals) && refusals.base("src", a.src, 4) &&
         refusals.base("dst_k", a.dst_k, 1) && refusals.base("dst_scale", a.dst_scale, kScaleBytes) &&
         pf::index_bases_acceptable(a, refusals) && refusals.disjoint("dst_k", a.dst_k, "src", a.src) &&
         pf::index_disjoint("dst_k", a.dst_k, a, refusals) &&
         refusals.disjoint("dst_scale", a.dst_scale, "src", a.src) &&
         pf::index_disjoint("dst_scale", a.dst_scale, a, refusals);
}

bool nothing_to_do(const Args& a) { return a.num_tokens == 0 || a.num_requests == 0; }

// What every schedule's kernel gets.
struct Gather {
  pf::ReadBytes<kSrc> src;
  pf::WriteBytes<kDstK> dst_k;
  pf::WriteBytes<kDstScale> dst_scale;
  pf::PagedGather<kBlockTable, kStarts, kSeqStarts, kCounts> gather;
  index64 page_stride_bytes;
  index64 k_row_stride_bytes;
  index64 scale_row_stride_bytes;
  index64 head_dim;
  index64 groups;  // scales of a token
  bool tiled;      // page_layout 1
};

// Ignored strides count as 0: there is but one row, or page, to be at.
int64_t page_stride_bytes(const Args& a) { return a.num_pages > 1 ? a.page_stride_bytes : 0; }
int64_t k_row_stride_bytes(const Args& a) { return a.dst_k_rows > 1 ? a.dst_k_row_stride_bytes : 0; }
int64_t scale_row_stride_bytes(const Args& a) { return a.dst_scale_rows > 1 ? a.dst_scale_row_stride_bytes : 0; }

Gather gather_of(const Args& a) {
  return {
      .src = pf::ReadBytes<kSrc>(a.src),
      .dst_k = pf::WriteBytes<kDstK>(a.dst_k),
      .dst_scale = pf::WriteBytes<kDstScale>(a.dst_scale),
      .gather = decltype(Gather::gather)::of(a),
      .page_stride_bytes = page_stride_bytes(a),
      .k_row_stride_bytes = k_row_stride_bytes(a),
      .scale_row_stride_bytes = scale_row_stride_bytes(a),
      .head_dim = a.head_dim,
      .groups = a.head_dim / a.quant_block,
      .tiled = a.page_layout == 1,
  };
}

// Of one access to keys. No more than pf::kTile, which divides head_dim and every offset inside a page.
int vector_bytes(const Args& a) {
  const int64_t addends = page_stride_bytes(a) | k_row_stride_bytes(a) | pf::kTile;
  return pf::widest_vector_bytes(static_cast<uint64_t>(addends) | reinterpret_cast<uintptr_t>(a.src.data) |
                                 reinterpret_cast<uintptr_t>(a.dst_k.data));
}

// A CTA as large as `tokens` tokens can use: a row of threads (x) copies a token's keys.
dim3 block_shape(const Args& a, int64_t tokens, int64_t most_lanes) {
  const int64_t vectors_per_token = a.head_dim / vector_bytes(a);
  const int64_t threads = pf::power_of_two_at_least(vectors_per_token * tokens, 32, kThreads);
  const int64_t lanes = pf::power_of_two_at_least(vectors_per_token, 1, std::min(threads, most_lanes));
  return dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(threads / lanes));
}

// ---- device side, shared by the schedules -----------------------------------------------------------

// Where a page's keys and its scales begin.
struct PageBytes {
  index64 keys;
  index64 scales;
};

__device__ __forceinline__ PageBytes page_bytes(const Gather& g, index64 physical) {
  const index64 keys = physical * g.page_stride_bytes;
  const index64 scales = physical * g.page_stride_bytes + g.gather.map.page_size_tokens * g.head_dim;
  return {keys, scales};
}

// A token's keys, by a row of threads.
template <class Vector>
__device__ __forceinline__ void copy_keys(const Gather& g, index64 row, index64 keys, index64 slot) {
  constexpr int64_t kVectorBytes = sizeof(Vector);
  const index64 to = row * g.k_row_stride_bytes;
  const index64 step = index64(blockDim.x) * kVectorBytes;
  for (index64 at = index64(threadIdx.x) * kVectorBytes; at < g.head_dim; at += step) {
    g.dst_k.store<Vector>(to + at, g.src.load<Vector>(keys + pf::indexer_key_offset(g.tiled, g.head_dim, slot, at)));
  }
}

// Scales [first, last) of a run of tokens, `first` and every `step`-th after it. `scales` is where those of
// the run's first token lie.
__device__ __forceinline__ void copy_scales(const Gather& g, index64 row, index64 scales, index64 first,
                                            index64 last, index64 step) {
  for (index64 word = first; word < last; word += step) {
    const index64 to = (row + word / g.groups) * g.scale_row_stride_bytes + word % g.groups * kScaleBytes;
    g.dst_scale.store<uint32_t>(to, g.src.load<uint32_t>(scales + word * kScaleBytes));
  }
}

// ---- schedule: page ---------------------------------------------------------------------------------

template <class Vector>
__global__ void __launch_bounds__(kThreads) gather_pages(Gather g) {
  const index64 thread = index64(threadIdx.y) * blockDim.x + threadIdx.x;
  g.gather.for_each_page(thread == 0, [&](index64 physical, const pf::PageSlice& slice) {
    const PageBytes from = page_bytes(g, physical);
    for (index64 token = threadIdx.y; token < slice.token_count; token += blockDim.y) {
      copy_keys<Vector>(g, slice.row_begin + token, from.keys, slice.slot_begin + token);
    }
    copy_scales(g, slice.row_begin, from.scales + slice.slot_begin * g.groups * kScaleBytes, thread,
                slice.token_count * g.groups, index64(blockDim.x) * blockDim.y);
  });
}

// ---- schedule: token --------------------------------------------------------------------------------

// A row of threads has one token at a time. The first row of a logical page counts for the page.
template <class Vector>
__global__ void __launch_bounds__(kThreads) gather_tokens(Gather g) {
  const auto& map = g.gather.map;
  const bool counts_row = threadIdx.x == 0;
  const index64 groups = index64(gridDim.x) * blockDim.y;
  const index64 end = map.row_boundary(map.num_requests);
  index64 row = map.row_boundary(0) + index64(blockIdx.x) * blockDim.y + threadIdx.y;
  while (row < end) {
    const index64 request = map.row_owner(row);
    const pf::RequestSpan span = map.span(request);
    const index64 position = span.position_begin + (row - span.row_begin);
    if (position >= span.position_end) {  // starts decrease, and whose the row is was not found
      row += groups;
      continue;
    }
    const index64 row_end = span.row_begin + (span.position_end - span.position_begin);
    const index64 rows_left = row_end - row;
    if (!span.placed) {
      if (counts_row && row == span.row_begin) g.gather.count(pf::kSkipped, 1);
      row += (rows_left + groups - 1) / groups * groups;
      continue;
    }
    const index64 page = position / map.page_size_tokens;
    const index64 slot = position - page * map.page_size_tokens;
    const bool first_of_page = row == span.row_begin || slot == 0;
    if (page >= g.gather.table_width) {  // and so are all pages from here on
      const bool first_past = first_of_page && (page == g.gather.table_width || page == span.page_begin);
      if (counts_row && first_past) g.gather.count(pf::kSkipped, span.page_end - page);
      row += (rows_left + groups - 1) / groups * groups;
      continue;
    }
    const index64 physical = g.gather.physical_page(request, page, counts_row && first_of_page);
    if (physical >= 0) {
      const PageBytes from = page_bytes(g, physical);
      copy_keys<Vector>(g, row, from.keys, slot);
      copy_scales(g, row, from.scales + slot * g.groups * kScaleBytes, threadIdx.x, g.groups, blockDim.x);
    }
    row += groups;
  }
}

}  // namespace

PF_EXPORT int pf_cp_gather_indexer_k_quant_cache_page(const pf_cp_gather_indexer_k_quant_cache_args* args,
                                                      pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  if (nothing_to_do(*args)) return PF_OK;
  const auto kernel = pf::by_vector_bytes(vector_bytes(*args), [](auto vector) {
    return gather_pages<typename decltype(vector)::type>;
  });
  const dim3 block = block_shape(*args, std::min(args->page_size_tokens, args->num_tokens), kThreads);
  const int64_t ctas = std::min(pf::page_task_limit(*args),
                                pf::resident_ctas(static_cast<int64_t>(block.x) * block.y));
  return pf::launch(kernel, {.grid = dim3(static_cast<unsigned>(ctas)), .block = block}, args->stream, message,
                    gather_of(*args));
}

PF_EXPORT int pf_cp_gather_indexer_k_quant_cache_token(const pf_cp_gather_indexer_k_quant_cache_args* args,
                                                       pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  if (nothing_to_do(*args)) return PF_OK;
  const auto kernel = pf::by_vector_bytes(vector_bytes(*args), [](auto vector) {
    return gather_tokens<typename decltype(vector)::type>;
  });
  const dim3 block = block_shape(*args, args->num_tokens, 32);
  const int64_t wanted = (args->num_tokens - 1) / block.y + 1;
  const int64_t ctas = std::min(wanted, pf::resident_ctas(static_cast<int64_t>(block.x) * block.y));
  return pf::launch(kernel, {.grid = dim3(static_cast<unsigned>(ctas)), .block = block}, args->stream, message,
                    gather_of(*args));
}
