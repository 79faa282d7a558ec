// (e) concat_and_cache_ds_mla: stores a token's latent part as fp8 with a scale for every 128 values, and its
// rope part as it is, in its slot of a paged cache of records.

#include <algorithm>

#include "common/codecs.h"
#include "common/group_scales.h"
#include "common/launch.h"
#include "common/mla_arguments.h"
#include "common/object.h"
#include "common/refusals.h"
#include "common/slot_map.h"

extern "C" {
// pagefuzz-abi: begin

typedef struct pf_concat_and_cache_ds_mla_args {
  int64_t struct_bytes;      /* sizeof(pf_concat_and_cache_ds_mla_args) */
  pf_array kv_c;             /* [kv_c_rows, kv_c_elements] bf16: rank 2 */
  pf_array k_pe;             /* [k_pe_rows, k_pe_elements] bf16: rank 2 */
  pf_array slot_mapping;     /* [num_tokens] int64: rank 1 */
  pf_array cache;            /* [num_pages, page_size_tokens, record] u8: rank 3; a record is kv_c_elements e4m3
                                codes, kv_c_elements / 128 fp32 scales, k_pe_elements raw values */
  pf_array counts;           /* [2] int64 (padding, skipped), optional: rank 1 */
  int64_t num_tokens;        /* length of slot_mapping */
  int64_t kv_c_rows;         /* at least num_tokens */
  int64_t k_pe_rows;         /* at least num_tokens */
  int64_t kv_c_row_stride_bytes;
  int64_t k_pe_row_stride_bytes;
  int64_t kv_c_elements;     /* a multiple of 128 */
  int64_t k_pe_elements;
  int64_t page_size_tokens;
  int64_t num_pages;
  int64_t page_stride_bytes; /* a multiple of 4 */
  int64_t slot_stride_bytes; /* a multiple of 4 */
  int64_t scale_kind;        /* 0: plain; 1: powers of two */
  void *stream;
} pf_concat_and_cache_ds_mla_args;

/* schedule: token
 * contains: yes
 * summary: a warp for each group of a token and one for its rope part, wide where alignment allows
 */
int pf_concat_and_cache_ds_mla_token(const pf_concat_and_cache_ds_mla_args *args, pf_message *message);

// pagefuzz-abi: end
}

namespace {

using Args = pf_concat_and_cache_ds_mla_args;
using pf::counted;
using pf::index64;

// Ids of the buffers: positions of the pf_arrays in Args.
enum Buffer : int { kKvC, kKPe, kSlotMapping, kCache, kCounts };

constexpr int64_t kGroup = 128;
constexpr int64_t kElementBytes = 2;
constexpr int64_t kScaleBytes = 4;

// ---- launchers' side --------------------------------------------------------------------------------

int64_t groups(const Args& a) { return a.kv_c_elements / kGroup; }
int64_t record_bytes(const Args& a) {
  return a.kv_c_elements + groups(a) * kScaleBytes + a.k_pe_elements * kElementBytes;
}

bool acceptable(const Args& a, pf_message* message) {
  pf::say(message, "");
  pf::Refusals refusals(message);

  const bool scalars =
      refusals.struct_size(a.struct_bytes, sizeof(Args)) &&
      refusals.in_range("scale_kind", a.scale_kind, pf::kPlainScale, pf::kPow2Scale) &&
      refusals.page_size(a.page_size_tokens) &&
      refusals.count("num_tokens", a.num_tokens) && refusals.count("num_pages", a.num_pages) &&
      refusals.in_range("kv_c_elements", a.kv_c_elements, 1, INT32_MAX) &&
      refusals.require(a.kv_c_elements % kGroup == 0, "kv_c_elements is {}, it must be a multiple of {}",
                       a.kv_c_elements, kGroup) &&
      refusals.in_range("k_pe_elements", a.k_pe_elements, 1, INT32_MAX) &&
      pf::mla_rows_acceptable(a, refusals);
  if (!scalars) return false;

  const bool types = pf::mla_types_acceptable(a, PF_BF16, refusals) && refusals.dtype("cache", a.cache, PF_U8) &&
                     refusals.vector("slot_mapping", a.slot_mapping, PF_I64) &&
                     refusals.optional_vector("counts", a.counts, PF_I64);
  if (!types) return false;

  const pf_array no_scale = {};
  const pf::MlaEntry record = {kElementBytes, kScaleBytes, record_bytes(a), "records"};
  return pf::mla_memory_acceptable(a, no_scale, record, refusals);
}

// What the kernel gets.
struct Write {
  pf::ReadBytes<kKvC> kv_c;
  pf::ReadBytes<kKPe> k_pe;
  pf::WriteBytes<kCache> cache;
  pf::SlotMap<kSlotMapping> map;
  pf::SlotCounts<kCounts> counts;
  index64 kv_c_row_stride_bytes;
  index64 k_pe_row_stride_bytes;
  index64 groups;      // of a token
  index64 k_pe_bytes;  // of a token
  index64 page_stride_bytes;
  index64 slot_stride_bytes;
  bool powers_of_two;
};

Write write_of(const Args& a) {
  return {
      .kv_c = pf::ReadBytes<kKvC>(a.kv_c),
      .k_pe = pf::ReadBytes<kKPe>(a.k_pe),
      .cache = pf::WriteBytes<kCache>(a.cache),
      .map = pf::SlotMap<kSlotMapping>::of(a),
      .counts = pf::SlotCounts<kCounts>(a.counts),
      .kv_c_row_stride_bytes = counted(a.kv_c_row_stride_bytes, a.kv_c_rows),
      .k_pe_row_stride_bytes = counted(a.k_pe_row_stride_bytes, a.k_pe_rows),
      .groups = groups(a),
      .k_pe_bytes = a.k_pe_elements * kElementBytes,
      .page_stride_bytes = counted(a.page_stride_bytes, a.num_pages),
      .slot_stride_bytes = counted(a.slot_stride_bytes, a.page_size_tokens),
      .powers_of_two = a.scale_kind == pf::kPow2Scale,
  };
}

// Of a group's codes; the size of a group allows any width.
pf::Addends code_addends(const Args& a) {
  const int64_t written = counted(a.page_stride_bytes, a.num_pages) | counted(a.slot_stride_bytes, a.page_size_tokens);
  return {static_cast<uint64_t>(counted(a.kv_c_row_stride_bytes, a.kv_c_rows)) |
              reinterpret_cast<uintptr_t>(a.kv_c.data),
          static_cast<uint64_t>(written) | reinterpret_cast<uintptr_t>(a.cache.data)};
}

// Of the rope part, which is copied: both sides. It follows the scales, and they are words.
int rope_vector_bytes(const Args& a) {
  const int64_t both = counted(a.k_pe_row_stride_bytes, a.k_pe_rows) | a.k_pe_elements * kElementBytes |
                       counted(a.page_stride_bytes, a.num_pages) | counted(a.slot_stride_bytes, a.page_size_tokens) |
                       (a.kv_c_elements + groups(a) * kScaleBytes);
  return std::min(4, pf::widest_vector_bytes(static_cast<uint64_t>(both) |
                                             reinterpret_cast<uintptr_t>(a.k_pe.data) |
                                             reinterpret_cast<uintptr_t>(a.cache.data)));
}

// ---- device side ------------------------------------------------------------------------------------

__device__ __forceinline__ float scale_of(float amax, bool power_of_two) {
  const float quotient = pf::divided(amax, pf::kLargestE4M3);
  constexpr float kLeastNormal = 0x1p-126f;
  if (!power_of_two) return pf::larger(quotient, kLeastNormal);
  return pf::power_of_two_not_below(pf::larger(quotient, pf::kSmallScale));
}

// ---- schedule: token --------------------------------------------------------------------------------

// Whole warps are at one task, so that every lane comes to the exchange.
template <class Codec, class Rope>
__global__ void __launch_bounds__(pf::kGroupThreads) write_tokens(Write w) {
  const index64 lane = threadIdx.x;
  const index64 tasks_per_token = w.groups + 1;
  const index64 tasks = w.map.num_tokens * tasks_per_token;
  const index64 stride = index64(gridDim.x) * blockDim.y;
  for (index64 task = index64(blockIdx.x) * blockDim.y + threadIdx.y; task < tasks; task += stride) {
    const index64 token = task / tasks_per_token;
    const index64 group = task % tasks_per_token;
    const pf::TokenSlot slot = w.map.at(token);
    if (slot.unwritten != pf::Unwritten::kNo) {
      if (threadIdx.x == 0 && group == 0) w.counts.add(slot);
      continue;
    }
    const index64 record = slot.page * w.page_stride_bytes + slot.offset * w.slot_stride_bytes;
    const index64 scales = record + w.groups * kGroup;
    if (group == w.groups) {
      pf::store_run<Rope>(w.k_pe, token * w.k_pe_row_stride_bytes, w.k_pe_bytes, w.cache,
                          scales + w.groups * kScaleBytes, 1.0f, lane, pf::kGroupLanes);
      continue;
    }
    const index64 from = token * w.kv_c_row_stride_bytes + group * (kGroup * kElementBytes);
    const float amax = pf::warp_amax<Codec>(w.kv_c, from, kGroup * kElementBytes, lane);
    const float scale = scale_of(amax, w.powers_of_two);
    if (threadIdx.x == 0) w.cache.store<float>(scales + group * kScaleBytes, scale);
    pf::store_run<Codec>(w.kv_c, from, kGroup * kElementBytes, w.cache, record + group * kGroup, scale, lane,
                         pf::kGroupLanes);
  }
}

}  // namespace

PF_EXPORT int pf_concat_and_cache_ds_mla_token(const pf_concat_and_cache_ds_mla_args* args, pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  if (args->num_tokens == 0) return PF_OK;
  return pf::by_group_codec(code_addends(*args), [&](auto codec) {
    using Codec = decltype(codec);
    const auto kernel = rope_vector_bytes(*args) == 4 ? write_tokens<Codec, pf::CopyCodec<uint32_t>>
                                                      : write_tokens<Codec, pf::CopyCodec<uint16_t>>;
    return pf::launch(kernel, pf::group_shape(args->num_tokens * (groups(*args) + 1)), args->stream, message,
                      write_of(*args));
  });
}
