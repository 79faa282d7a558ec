// (e) reshape_and_cache_flash: stores a token's keys and values, head by head, in its slot of two paged caches.

#include <algorithm>

#include "common/codecs.h"
#include "common/launch.h"
#include "common/nesting.h"
#include "common/object.h"
#include "common/refusals.h"
#include "common/slot_map.h"

extern "C" {
// pagefuzz-abi: begin

typedef struct pf_reshape_and_cache_flash_args {
  int64_t struct_bytes;      /* sizeof(pf_reshape_and_cache_flash_args) */
  pf_array key;              /* [key_rows, num_heads, head_elements] of input_dtype, heads dense: rank 3 */
  pf_array value;            /* [value_rows, num_heads, head_elements] of input_dtype, heads dense: rank 3 */
  pf_array slot_mapping;     /* [num_tokens] int64: rank 1 */
  pf_array k_scale;          /* [scale_count] f32: rank 1, optional with kv_dtype 0 and not read then */
  pf_array v_scale;          /* as k_scale */
  pf_array key_cache;        /* [num_pages, page_size_tokens, num_heads, head_elements]: rank 4; of input_dtype
                                with kv_dtype 0, else u8 or the fp8 type */
  pf_array value_cache;      /* as key_cache; the two may interleave */
  pf_array counts;           /* [2] int64 (padding, skipped), optional: rank 1 */
  int64_t num_tokens;        /* length of slot_mapping */
  int64_t key_rows;          /* at least num_tokens */
  int64_t value_rows;        /* at least num_tokens */
  int64_t key_row_stride_bytes;
  int64_t value_row_stride_bytes;
  int64_t num_heads;         /* 1..65535 */
  int64_t head_elements;
  int64_t scale_count;       /* 1: one scale for all heads; num_heads: one a head */
  int64_t page_size_tokens;
  int64_t num_pages;
  int64_t key_page_stride_bytes;
  int64_t key_slot_stride_bytes;
  int64_t key_head_stride_bytes;
  int64_t value_page_stride_bytes;
  int64_t value_slot_stride_bytes;
  int64_t value_head_stride_bytes;
  int64_t input_dtype;       /* PF_F32, PF_F16 or PF_BF16: of both inputs, and of the caches with kv_dtype 0 */
  int64_t kv_dtype;          /* 0: auto, as the input; codes of value / scale in 1: fp8_e4m3, 2: fp8_e5m2 */
  void *stream;
} pf_reshape_and_cache_flash_args;

/* schedule: token
 * contains: yes
 * summary: a row of threads a token, all heads of a token at once, wide where alignment allows
 */
int pf_reshape_and_cache_flash_token(const pf_reshape_and_cache_flash_args *args, pf_message *message);

// pagefuzz-abi: end
}

namespace {

using Args = pf_reshape_and_cache_flash_args;
using pf::counted;
using pf::index64;

// Ids of the buffers: positions of the pf_arrays in Args.
enum Buffer : int { kKey, kValue, kSlotMapping, kKScale, kVScale, kKeyCache, kValueCache, kCounts };

// ---- launchers' side --------------------------------------------------------------------------------

// What key and value each have of their own, with the names that refusals speak of.
struct Side {
  pf::Name input_name;
  const pf_array& input;
  pf::Name rows_name;
  int64_t rows;
  pf::Name row_stride_name;
  int64_t row_stride_bytes;
  pf::Name scale_name;
  const pf_array& scale;
  pf::Name cache_name;
  const pf_array& cache;
  pf::Name page_stride_name;
  int64_t page_stride_bytes;
  pf::Name slot_stride_name;
  int64_t slot_stride_bytes;
  pf::Name head_stride_name;
  int64_t head_stride_bytes;
};

Side key_side(const Args& a) {
  return {"key", a.key, "key_rows", a.key_rows, "key_row_stride_bytes", a.key_row_stride_bytes, "k_scale", a.k_scale,
          "key_cache", a.key_cache, "key_page_stride_bytes", a.key_page_stride_bytes, "key_slot_stride_bytes",
          a.key_slot_stride_bytes, "key_head_stride_bytes", a.key_head_stride_bytes};
}

Side value_side(const Args& a) {
  return {"value", a.value, "value_rows", a.value_rows, "value_row_stride_bytes", a.value_row_stride_bytes, "v_scale",
          a.v_scale, "value_cache", a.value_cache, "value_page_stride_bytes", a.value_page_stride_bytes,
          "value_slot_stride_bytes", a.value_slot_stride_bytes, "value_head_stride_bytes", a.value_head_stride_bytes};
}

int64_t input_bytes(const Args& a) { return a.input_dtype == PF_F32 ? 4 : 2; }
int64_t cache_bytes(const Args& a) { return a.kv_dtype == pf::kAuto ? input_bytes(a) : 1; }

bool acceptable_types(const Args& a, const Side& s, pf::Refusals& refusals) {
  const bool scaled = a.kv_dtype != pf::kAuto;
  const auto input_dtype = static_cast<int32_t>(a.input_dtype);
  return refusals.require(a.num_tokens <= s.rows, "slot_mapping has {} tokens, {} is only {}", a.num_tokens,
                          s.rows_name, s.rows) &&
         refusals.rank(s.input_name, s.input, 3) && refusals.dtype(s.input_name, s.input, input_dtype) &&
         refusals.rank(s.cache_name, s.cache, 4) &&
         (scaled ? s.cache.dtype == PF_U8 || refusals.dtype(s.cache_name, s.cache, pf::fp8_dtype(a.kv_dtype))
                 : refusals.dtype(s.cache_name, s.cache, input_dtype)) &&
         refusals.require(!pf::absent(s.scale) || !scaled, "{} is null, with kv_dtype {} it must be given",
                          s.scale_name, a.kv_dtype) &&
         refusals.optional_vector(s.scale_name, s.scale, PF_F32);
}

bool acceptable_memory(const Args& a, const Side& s, pf::Refusals& refusals) {
  const int64_t in = input_bytes(a);
  const int64_t out = cache_bytes(a);
  const bool strides =
      (s.rows <= 1 || refusals.stride(s.row_stride_name, s.row_stride_bytes, in)) &&
      (a.num_pages <= 1 || refusals.stride(s.page_stride_name, s.page_stride_bytes, out)) &&
      (a.page_size_tokens <= 1 || refusals.stride(s.slot_stride_name, s.slot_stride_bytes, out)) &&
      (a.num_heads <= 1 || refusals.stride(s.head_stride_name, s.head_stride_bytes, out));
  if (!strides) return false;

  // Only the first num_tokens rows count; whether the stride does is up to all of them.
  const pf::Dimensions input = {{a.num_tokens, s.row_stride_bytes}};
  const pf::Dimensions cache = {{a.num_pages, s.page_stride_bytes},
                                 {a.page_size_tokens, s.slot_stride_bytes},
                                 {a.num_heads, s.head_stride_bytes}};
  return refusals.extent(s.input_name, s.input, pf::extent_of(input, a.num_heads * a.head_elements * in)) &&
         refusals.extent(s.cache_name, s.cache, pf::extent_of(cache, a.head_elements * out)) &&
         refusals.optional_extent(s.scale_name, s.scale, a.scale_count * 4) &&
         refusals.base(s.input_name, s.input, in) && refusals.base(s.cache_name, s.cache, out) &&
         refusals.base(s.scale_name, s.scale, 4) &&
         refusals.require(pf::nests(cache, a.head_elements * out),
                          "{} does not nest: with strides of {}, {} and {} bytes heads of {} bytes overlap",
                          s.cache_name, s.page_stride_bytes, s.slot_stride_bytes, s.head_stride_bytes,
                          a.head_elements * out);
}

bool disjoint_from_all(const Args& a, const Side& s, pf::Refusals& refusals) {
  return refusals.disjoint(s.cache_name, s.cache, "key", a.key) &&
         refusals.disjoint(s.cache_name, s.cache, "value", a.value) &&
         refusals.disjoint(s.cache_name, s.cache, "slot_mapping", a.slot_mapping) &&
         refusals.disjoint(s.cache_name, s.cache, "k_scale", a.k_scale) &&
         refusals.disjoint(s.cache_name, s.cache, "v_scale", a.v_scale) &&
         refusals.disjoint(s.cache_name, s.cache, "counts", a.counts);
}

bool acceptable(const Args& a, pf_message* message) {
  pf::say(message, "");
  pf::Refusals refusals(message);
  const Side key = key_side(a);
  const Side value = value_side(a);

  const bool scalars =
      refusals.struct_size(a.struct_bytes, sizeof(Args)) &&
      refusals.in_range("kv_dtype", a.kv_dtype, pf::kAuto, pf::kFp8E5M2) &&
      refusals.require(a.input_dtype == PF_F32 || a.input_dtype == PF_F16 || a.input_dtype == PF_BF16,
                       "input_dtype is {}, it must be {} (f16), {} (bf16) or {} (f32)", a.input_dtype, int{PF_F16},
                       int{PF_BF16}, int{PF_F32}) &&
      refusals.page_size(a.page_size_tokens) &&
      refusals.count("num_tokens", a.num_tokens) && refusals.count("num_pages", a.num_pages) &&
      refusals.in_range("num_heads", a.num_heads, 1, 65535) &&
      refusals.in_range("head_elements", a.head_elements, 1, INT32_MAX) &&
      refusals.require(a.scale_count == 1 || a.scale_count == a.num_heads,
                       "scale_count is {}, it must be 1 or num_heads = {}", a.scale_count, a.num_heads);
  if (!scalars) return false;

  return acceptable_types(a, key, refusals) && acceptable_types(a, value, refusals) &&
         refusals.vector("slot_mapping", a.slot_mapping, PF_I64) &&
         refusals.optional_vector("counts", a.counts, PF_I64) &&
         acceptable_memory(a, key, refusals) && acceptable_memory(a, value, refusals) &&
         refusals.extent("slot_mapping", a.slot_mapping, a.num_tokens * 8) &&
         refusals.optional_extent("counts", a.counts, 16) &&
         refusals.base("slot_mapping", a.slot_mapping, 8) && refusals.base("counts", a.counts, 8) &&
         disjoint_from_all(a, key, refusals) && disjoint_from_all(a, value, refusals);
}

// What the kernel gets of one side.
template <int kInput, int kScale, int kCache>
struct Stored {
  pf::ReadBytes<kInput> input;
  pf::ReadView<float, kScale> scale;
  pf::WriteBytes<kCache> cache;
  index64 row_stride_bytes;
  index64 page_stride_bytes;
  index64 slot_stride_bytes;
  index64 head_stride_bytes;
};

template <int kInput, int kScale, int kCache>
Stored<kInput, kScale, kCache> stored_of(const Args& a, const Side& s) {
  return {
      .input = pf::ReadBytes<kInput>(s.input),
      .scale = pf::ReadView<float, kScale>(s.scale),
      .cache = pf::WriteBytes<kCache>(s.cache),
      .row_stride_bytes = counted(s.row_stride_bytes, s.rows),
      .page_stride_bytes = counted(s.page_stride_bytes, a.num_pages),
      .slot_stride_bytes = counted(s.slot_stride_bytes, a.page_size_tokens),
      .head_stride_bytes = counted(s.head_stride_bytes, a.num_heads),
  };
}

struct Write {
  Stored<kKey, kKScale, kKeyCache> key;
  Stored<kValue, kVScale, kValueCache> value;
  pf::SlotMap<kSlotMapping> map;
  pf::SlotCounts<kCounts> counts;
  index64 run_bytes;  // of input that lies in one piece on both sides and has one scale
  index64 run_count;  // of a token: its heads, or 1
  bool scale_a_run;
};

Write write_of(const Args& a) {
  const int64_t head_bytes = a.head_elements * cache_bytes(a);
  const bool dense = a.key_head_stride_bytes == head_bytes && a.value_head_stride_bytes == head_bytes;
  const bool one_run = a.num_heads == 1 || (dense && (a.scale_count == 1 || a.kv_dtype == pf::kAuto));
  return {
      .key = stored_of<kKey, kKScale, kKeyCache>(a, key_side(a)),
      .value = stored_of<kValue, kVScale, kValueCache>(a, value_side(a)),
      .map = pf::SlotMap<kSlotMapping>::of(a),
      .counts = pf::SlotCounts<kCounts>(a.counts),
      .run_bytes = a.head_elements * input_bytes(a) * (one_run ? a.num_heads : 1),
      .run_count = one_run ? 1 : a.num_heads,
      .scale_a_run = a.scale_count > 1,
  };
}

pf::Addends addends(const Args& a) {
  pf::Addends both = {static_cast<uint64_t>(a.head_elements * input_bytes(a)),
                      static_cast<uint64_t>(a.head_elements * cache_bytes(a))};
  for (const Side& s : {key_side(a), value_side(a)}) {
    both.read |= static_cast<uint64_t>(counted(s.row_stride_bytes, s.rows)) |
                 reinterpret_cast<uintptr_t>(s.input.data);
    both.written |= static_cast<uint64_t>(counted(s.page_stride_bytes, a.num_pages) |
                                          counted(s.slot_stride_bytes, a.page_size_tokens) |
                                          counted(s.head_stride_bytes, a.num_heads)) |
                    reinterpret_cast<uintptr_t>(s.cache.data);
  }
  return both;
}

// ---- schedule: token --------------------------------------------------------------------------------

// Stores all runs of a token; neighbouring threads have neighbouring elements, across heads too.
template <class Codec, class Side>
__device__ __forceinline__ void store_token(const Write& w, const Side& side, index64 token,
                                            const pf::TokenSlot& slot) {
  using In = typename Codec::In;
  using Out = typename Codec::Out;
  const index64 from = token * side.row_stride_bytes;
  const index64 to = slot.page * side.page_stride_bytes + slot.offset * side.slot_stride_bytes;
  const index64 run_steps = w.run_bytes / static_cast<int64_t>(sizeof(In));
  const index64 steps = run_steps * w.run_count;
  for (index64 step = threadIdx.x; step < steps; step += blockDim.x) {
    const index64 run = w.run_count == 1 ? index64(0) : step / run_steps;
    const index64 within = step - run * run_steps;
    const float scale = Codec::kScaled ? side.scale.load(w.scale_a_run ? run : index64(0)) : 1.0f;
    const In in = side.input.template load<In>(from + step * static_cast<int64_t>(sizeof(In)));
    side.cache.template store<Out>(to + run * side.head_stride_bytes + within * static_cast<int64_t>(sizeof(Out)),
                                   Codec::convert(in, scale));
  }
}

template <class Codec>
__global__ void __launch_bounds__(pf::kTokenThreads) write_tokens(Write w) {
  const index64 stride = index64(gridDim.x) * blockDim.y;
  for (index64 token = index64(blockIdx.x) * blockDim.y + threadIdx.y; token < w.map.num_tokens; token += stride) {
    const pf::TokenSlot slot = w.map.at(token);
    if (slot.unwritten != pf::Unwritten::kNo) {
      if (threadIdx.x == 0) w.counts.add(slot);
      continue;
    }
    store_token<Codec>(w, w.key, token, slot);
    store_token<Codec>(w, w.value, token, slot);
  }
}

}  // namespace

PF_EXPORT int pf_reshape_and_cache_flash_token(const pf_reshape_and_cache_flash_args* args, pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  if (args->num_tokens == 0) return PF_OK;
  return pf::by_codec(args->kv_dtype, args->input_dtype, addends(*args), [&](auto codec) {
    using Codec = decltype(codec);
    const int64_t token_bytes = args->num_heads * args->head_elements * input_bytes(*args);
    const int64_t steps = token_bytes / static_cast<int64_t>(sizeof(typename Codec::In));
    return pf::launch(write_tokens<Codec>, pf::token_shape(args->num_tokens, steps), args->stream, message,
                      write_of(*args));
  });
}
