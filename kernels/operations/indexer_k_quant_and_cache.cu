// (e) indexer_k_quant_and_cache: stores a token's indexer key as fp8 and its scales in its slot of a paged cache,
// of whose pages all keys come first, then all scales.

#include <algorithm>

#include "common/codecs.h"
#include "common/group_scales.h"
#include "common/indexer_pages.h"
#include "common/launch.h"
#include "common/nesting.h"
#include "common/object.h"
#include "common/refusals.h"
#include "common/slot_map.h"

extern "C" {
// pagefuzz-abi: begin

typedef struct pf_indexer_k_quant_and_cache_args {
  int64_t struct_bytes;      /* sizeof(pf_indexer_k_quant_and_cache_args) */
  pf_array k;                /* [k_rows, head_dim] bf16: rank 2 */
  pf_array slot_mapping;     /* [num_tokens] int64: rank 1 */
  pf_array cache;            /* [num_pages, page_size_tokens, head_dim + 4 * groups] u8, groups = head_dim /
                                quant_block: rank 3; of a page all key bytes come first, then all scales */
  pf_array counts;           /* [2] int64 (padding, skipped), optional: rank 1 */
  int64_t num_tokens;        /* length of slot_mapping */
  int64_t k_rows;            /* at least num_tokens */
  int64_t k_row_stride_bytes;
  int64_t head_dim;          /* values of a token: a multiple of 16, up to 1024 */
  int64_t quant_block;       /* values that share a scale: divides head_dim */
  int64_t page_layout;       /* 0: flat; 1: tiles of 16 tokens x 16 bytes */
  int64_t page_size_tokens;  /* a multiple of 16 with page_layout 1 */
  int64_t num_pages;
  int64_t page_stride_bytes; /* a multiple of 4, at least page_size_tokens * (head_dim + 4 * groups) */
  int64_t scale_kind;        /* 0: plain; 1: powers of two */
  void *stream;
} pf_indexer_k_quant_and_cache_args;

/* schedule: token
 * contains: yes
 * summary: a warp for each group of a token, wide where alignment allows
 */
int pf_indexer_k_quant_and_cache_token(const pf_indexer_k_quant_and_cache_args *args, pf_message *message);

// pagefuzz-abi: end
}

namespace {

using Args = pf_indexer_k_quant_and_cache_args;
using pf::index64;

// Ids of the buffers: positions of the pf_arrays in Args.
enum Buffer : int { kK, kSlotMapping, kCache, kCounts };

constexpr int64_t kElementBytes = 2;
constexpr int64_t kScaleBytes = 4;

// ---- launchers' side --------------------------------------------------------------------------------

int64_t groups(const Args& a) { return a.head_dim / a.quant_block; }
int64_t page_bytes(const Args& a) { return a.page_size_tokens * (a.head_dim + groups(a) * kScaleBytes); }

bool acceptable(const Args& a, pf_message* message) {
  pf::say(message, "");
  pf::Refusals refusals(message);

  const bool scalars =
      refusals.struct_size(a.struct_bytes, sizeof(Args)) &&
      pf::indexer_key_acceptable(a, refusals) &&
      refusals.in_range("scale_kind", a.scale_kind, pf::kPlainScale, pf::kPow2Scale) &&
      pf::indexer_page_acceptable(a, refusals) &&
      refusals.count("num_tokens", a.num_tokens) && refusals.count("num_pages", a.num_pages) &&
      refusals.require(a.num_tokens <= a.k_rows, "slot_mapping has {} tokens, k has only {} rows", a.num_tokens,
                       a.k_rows);
  if (!scalars) return false;

  const bool types =
      refusals.rank("k", a.k, 2) && refusals.dtype("k", a.k, PF_BF16) && refusals.rank("cache", a.cache, 3) &&
      refusals.dtype("cache", a.cache, PF_U8) && refusals.vector("slot_mapping", a.slot_mapping, PF_I64) &&
      refusals.optional_vector("counts", a.counts, PF_I64);
  if (!types) return false;

  const bool strides =
      (a.k_rows <= 1 || refusals.stride("k_row_stride_bytes", a.k_row_stride_bytes, kElementBytes)) &&
      pf::indexer_page_stride_acceptable(a, page_bytes(a), refusals);
  if (!strides) return false;

  const pf::Dimensions k = {{a.num_tokens, a.k_row_stride_bytes}};
  const pf::Dimensions cache = {{a.num_pages, a.page_stride_bytes}};
  return refusals.extent("k", a.k, pf::extent_of(k, a.head_dim * kElementBytes)) &&
         refusals.extent("slot_mapping", a.slot_mapping, a.num_tokens * 8) &&
         refusals.extent("cache", a.cache, pf::extent_of(cache, page_bytes(a))) &&
         refusals.optional_extent("counts", a.counts, 16) && refusals.base("k", a.k, kElementBytes) &&
         refusals.base("slot_mapping", a.slot_mapping, 8) && refusals.base("cache", a.cache, kScaleBytes) &&
         refusals.base("counts", a.counts, 8) && refusals.disjoint("cache", a.cache, "k", a.k) &&
         refusals.disjoint("cache", a.cache, "slot_mapping", a.slot_mapping) &&
         refusals.disjoint("cache", a.cache, "counts", a.counts);
}

// What the kernel gets.
struct Write {
  pf::ReadBytes<kK> k;
  pf::WriteBytes<kCache> cache;
  pf::SlotMap<kSlotMapping> map;
  pf::SlotCounts<kCounts> counts;
  index64 k_row_stride_bytes;
  index64 page_stride_bytes;
  index64 head_dim;
  index64 quant_block;
  bool tiled;  // page_layout 1
  bool powers_of_two;
};

// Ignored strides become 0, which is aligned to anything.
int64_t k_row_stride_bytes(const Args& a) { return a.k_rows > 1 ? a.k_row_stride_bytes : 0; }
int64_t page_stride_bytes(const Args& a) { return a.num_pages > 1 ? a.page_stride_bytes : 0; }

Write write_of(const Args& a) {
  return {
      .k = pf::ReadBytes<kK>(a.k),
      .cache = pf::WriteBytes<kCache>(a.cache),
      .map = pf::SlotMap<kSlotMapping>::of(a),
      .counts = pf::SlotCounts<kCounts>(a.counts),
      .k_row_stride_bytes = k_row_stride_bytes(a),
      .page_stride_bytes = page_stride_bytes(a),
      .head_dim = a.head_dim,
      .quant_block = a.quant_block,
      .tiled = a.page_layout == 1,
      .powers_of_two = a.scale_kind == pf::kPow2Scale,
  };
}

// No access is wider than pf::kTile codes, and none begins but at a multiple of its width in a row: it stays in a
// tile, and in a group.
pf::Addends addends(const Args& a) {
  return {static_cast<uint64_t>(k_row_stride_bytes(a) | a.quant_block * kElementBytes) |
              reinterpret_cast<uintptr_t>(a.k.data),
          static_cast<uint64_t>(page_stride_bytes(a)) | reinterpret_cast<uintptr_t>(a.cache.data)};
}

// ---- device side ------------------------------------------------------------------------------------

__device__ __forceinline__ float scale_of(float amax, bool power_of_two) {
  const float scale = pf::divided(pf::larger(amax, pf::kSmallScale), pf::kLargestE4M3);
  return power_of_two ? pf::power_of_two_not_below(scale) : scale;
}

// ---- schedule: token --------------------------------------------------------------------------------

// Whole warps are at one task, so that every lane comes to the exchange.
template <class Codec>
__global__ void __launch_bounds__(pf::kGroupThreads) write_tokens(Write w) {
  using In = typename Codec::In;
  using Out = typename Codec::Out;
  constexpr int64_t kElements = sizeof(Out);
  const index64 groups = w.head_dim / w.quant_block;
  const index64 tasks = w.map.num_tokens * groups;
  const index64 stride = index64(gridDim.x) * blockDim.y;
  for (index64 task = index64(blockIdx.x) * blockDim.y + threadIdx.y; task < tasks; task += stride) {
    const index64 token = task / groups;
    const index64 group = task % groups;
    const pf::TokenSlot slot = w.map.at(token);
    if (slot.unwritten != pf::Unwritten::kNo) {
      if (threadIdx.x == 0 && group == 0) w.counts.add(slot);
      continue;
    }
    const index64 keys = slot.page * w.page_stride_bytes;
    const index64 scales = keys + w.map.page_size_tokens * w.head_dim + slot.offset * groups * kScaleBytes;
    const index64 row = token * w.k_row_stride_bytes;
    const index64 first = group * w.quant_block;
    const index64 end = first + w.quant_block;
    const float amax =
        pf::warp_amax<Codec>(w.k, row + first * kElementBytes, w.quant_block * kElementBytes, threadIdx.x);
    const float scale = scale_of(amax, w.powers_of_two);
    if (threadIdx.x == 0) w.cache.store<float>(scales + group * kScaleBytes, scale);
    for (index64 at = first + index64(threadIdx.x) * kElements; at < end; at += pf::kGroupLanes * kElements) {
      const In in = w.k.load<In>(row + at * kElementBytes);
      const index64 to = keys + pf::indexer_key_offset(w.tiled, w.head_dim, slot.offset, at);
      w.cache.store<Out>(to, Codec::convert(in, scale));
    }
  }
}

}  // namespace

PF_EXPORT int pf_indexer_k_quant_and_cache_token(const pf_indexer_k_quant_and_cache_args* args, pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  if (args->num_tokens == 0) return PF_OK;
  return pf::by_group_codec(addends(*args), [&](auto codec) {
    return pf::launch(write_tokens<decltype(codec)>, pf::group_shape(args->num_tokens * groups(*args)), args->stream,
                      message, write_of(*args));
  });
}
