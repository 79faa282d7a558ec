// (e) concat_and_cache_mla: stores a token's latent and rope parts side by side in its slot of a paged cache.

#include <algorithm>

#include "common/codecs.h"
#include "common/launch.h"
#include "common/mla_arguments.h"
#include "common/object.h"
#include "common/refusals.h"
#include "common/slot_map.h"

extern "C" {
// pagefuzz-abi: begin

typedef struct pf_concat_and_cache_mla_args {
  int64_t struct_bytes;      /* sizeof(pf_concat_and_cache_mla_args) */
  pf_array kv_c;             /* [kv_c_rows, kv_c_elements] of input_dtype: rank 2 */
  pf_array k_pe;             /* [k_pe_rows, k_pe_elements] of input_dtype: rank 2 */
  pf_array slot_mapping;     /* [num_tokens] int64: rank 1 */
  pf_array scale;            /* [1] f32: rank 1, optional with kv_dtype 0 and not read then */
  pf_array cache;            /* [num_pages, page_size_tokens, kv_c_elements + k_pe_elements]: rank 3; of
                                input_dtype with kv_dtype 0, else u8 or the fp8 type */
  pf_array counts;           /* [2] int64 (padding, skipped), optional: rank 1 */
  int64_t num_tokens;        /* length of slot_mapping */
  int64_t kv_c_rows;         /* at least num_tokens */
  int64_t k_pe_rows;         /* at least num_tokens */
  int64_t kv_c_row_stride_bytes;
  int64_t k_pe_row_stride_bytes;
  int64_t kv_c_elements;
  int64_t k_pe_elements;
  int64_t page_size_tokens;
  int64_t num_pages;
  int64_t page_stride_bytes;
  int64_t slot_stride_bytes;
  int64_t input_dtype;       /* PF_F32, PF_F16 or PF_BF16: of both inputs, and of the cache with kv_dtype 0 */
  int64_t kv_dtype;          /* 0: auto, as the input; codes of value / scale in 1: fp8_e4m3, 2: fp8_e5m2 */
  void *stream;
} pf_concat_and_cache_mla_args;

/* schedule: token
 * contains: yes
 * summary: a row of threads a token, wide where alignment allows
 */
int pf_concat_and_cache_mla_token(const pf_concat_and_cache_mla_args *args, pf_message *message);

// pagefuzz-abi: end
}

namespace {

using Args = pf_concat_and_cache_mla_args;
using pf::counted;
using pf::index64;

// Ids of the buffers: positions of the pf_arrays in Args.
enum Buffer : int { kKvC, kKPe, kSlotMapping, kScale, kCache, kCounts };

// ---- launchers' side --------------------------------------------------------------------------------

int64_t input_bytes(const Args& a) { return a.input_dtype == PF_F32 ? 4 : 2; }
int64_t cache_bytes(const Args& a) { return a.kv_dtype == pf::kAuto ? input_bytes(a) : 1; }
int64_t entry_bytes(const Args& a) { return (a.kv_c_elements + a.k_pe_elements) * cache_bytes(a); }

bool acceptable(const Args& a, pf_message* message) {
  pf::say(message, "");
  pf::Refusals refusals(message);

  const bool scalars =
      refusals.struct_size(a.struct_bytes, sizeof(Args)) &&
      refusals.in_range("kv_dtype", a.kv_dtype, pf::kAuto, pf::kFp8E5M2) &&
      refusals.require(a.input_dtype == PF_F32 || a.input_dtype == PF_F16 || a.input_dtype == PF_BF16,
                       "input_dtype is {}, it must be {} (f16), {} (bf16) or {} (f32)", a.input_dtype, int{PF_F16},
                       int{PF_BF16}, int{PF_F32}) &&
      refusals.page_size(a.page_size_tokens) &&
      refusals.count("num_tokens", a.num_tokens) && refusals.count("num_pages", a.num_pages) &&
      refusals.in_range("kv_c_elements", a.kv_c_elements, 1, INT32_MAX) &&
      refusals.in_range("k_pe_elements", a.k_pe_elements, 1, INT32_MAX) &&
      pf::mla_rows_acceptable(a, refusals);
  if (!scalars) return false;

  const bool scaled = a.kv_dtype != pf::kAuto;
  const auto input_dtype = static_cast<int32_t>(a.input_dtype);
  const bool types =
      pf::mla_types_acceptable(a, input_dtype, refusals) &&
      (scaled ? a.cache.dtype == PF_U8 || refusals.dtype("cache", a.cache, pf::fp8_dtype(a.kv_dtype))
              : refusals.dtype("cache", a.cache, input_dtype)) &&
      refusals.vector("slot_mapping", a.slot_mapping, PF_I64) &&
      refusals.require(!pf::absent(a.scale) || !scaled, "scale is null, with kv_dtype {} it must be given",
                       a.kv_dtype) &&
      refusals.optional_vector("scale", a.scale, PF_F32) && refusals.optional_vector("counts", a.counts, PF_I64);
  if (!types) return false;

  const pf::MlaEntry entry = {input_bytes(a), cache_bytes(a), entry_bytes(a), "entries"};
  return pf::mla_memory_acceptable(a, a.scale, entry, refusals);
}

// What the kernel gets.
struct Write {
  pf::ReadBytes<kKvC> kv_c;
  pf::ReadBytes<kKPe> k_pe;
  pf::ReadView<float, kScale> scale;
  pf::WriteBytes<kCache> cache;
  pf::SlotMap<kSlotMapping> map;
  pf::SlotCounts<kCounts> counts;
  index64 kv_c_row_stride_bytes;
  index64 k_pe_row_stride_bytes;
  index64 kv_c_bytes;     // of input, a token
  index64 k_pe_bytes;
  index64 k_pe_at_bytes;  // where the rope part begins in an entry
  index64 page_stride_bytes;
  index64 slot_stride_bytes;
};

Write write_of(const Args& a) {
  return {
      .kv_c = pf::ReadBytes<kKvC>(a.kv_c),
      .k_pe = pf::ReadBytes<kKPe>(a.k_pe),
      .scale = pf::ReadView<float, kScale>(a.scale),
      .cache = pf::WriteBytes<kCache>(a.cache),
      .map = pf::SlotMap<kSlotMapping>::of(a),
      .counts = pf::SlotCounts<kCounts>(a.counts),
      .kv_c_row_stride_bytes = counted(a.kv_c_row_stride_bytes, a.kv_c_rows),
      .k_pe_row_stride_bytes = counted(a.k_pe_row_stride_bytes, a.k_pe_rows),
      .kv_c_bytes = a.kv_c_elements * input_bytes(a),
      .k_pe_bytes = a.k_pe_elements * input_bytes(a),
      .k_pe_at_bytes = a.kv_c_elements * cache_bytes(a),
      .page_stride_bytes = counted(a.page_stride_bytes, a.num_pages),
      .slot_stride_bytes = counted(a.slot_stride_bytes, a.page_size_tokens),
  };
}

pf::Addends addends(const Args& a) {
  const int64_t read = counted(a.kv_c_row_stride_bytes, a.kv_c_rows) | counted(a.k_pe_row_stride_bytes, a.k_pe_rows) |
                       (a.kv_c_elements * input_bytes(a)) | (a.k_pe_elements * input_bytes(a));
  const int64_t written = counted(a.page_stride_bytes, a.num_pages) |
                          counted(a.slot_stride_bytes, a.page_size_tokens) | (a.kv_c_elements * cache_bytes(a));
  return {static_cast<uint64_t>(read) | reinterpret_cast<uintptr_t>(a.kv_c.data) |
              reinterpret_cast<uintptr_t>(a.k_pe.data),
          static_cast<uint64_t>(written) | reinterpret_cast<uintptr_t>(a.cache.data)};
}

// ---- schedule: token --------------------------------------------------------------------------------

template <class Codec>
__global__ void __launch_bounds__(pf::kTokenThreads) write_tokens(Write w) {
  const float scale = Codec::kScaled ? w.scale.load(0) : 1.0f;
  const index64 lane = threadIdx.x;
  const index64 lanes = blockDim.x;
  const index64 stride = index64(gridDim.x) * blockDim.y;
  for (index64 token = index64(blockIdx.x) * blockDim.y + threadIdx.y; token < w.map.num_tokens; token += stride) {
    const pf::TokenSlot slot = w.map.at(token);
    if (slot.unwritten != pf::Unwritten::kNo) {
      if (threadIdx.x == 0) w.counts.add(slot);
      continue;
    }
    const index64 to = slot.page * w.page_stride_bytes + slot.offset * w.slot_stride_bytes;
    pf::store_run<Codec>(w.kv_c, token * w.kv_c_row_stride_bytes, w.kv_c_bytes, w.cache, to, scale, lane, lanes);
    pf::store_run<Codec>(w.k_pe, token * w.k_pe_row_stride_bytes, w.k_pe_bytes, w.cache, to + w.k_pe_at_bytes, scale,
                         lane, lanes);
  }
}

}  // namespace

PF_EXPORT int pf_concat_and_cache_mla_token(const pf_concat_and_cache_mla_args* args, pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  if (args->num_tokens == 0) return PF_OK;
  return pf::by_codec(args->kv_dtype, args->input_dtype, addends(*args), [&](auto codec) {
    using Codec = decltype(codec);
    const int64_t steps = args->kv_c_elements * input_bytes(*args) / static_cast<int64_t>(sizeof(typename Codec::In));
    return pf::launch(write_tokens<Codec>, pf::token_shape(args->num_tokens, steps), args->stream, message,
                      write_of(*args));
  });
}
