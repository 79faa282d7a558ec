// What every writer of latent and rope parts refuses of its inputs and its cache. Host code; `Args` is any args
// struct with the members that concat_and_cache_mla's has, less the scale.
#pragma once

#include "common/nesting.h"
#include "common/refusals.h"

namespace pf {

template <class Args>
bool mla_rows_acceptable(const Args& a, Refusals& refusals) {
  return refusals.require(a.num_tokens <= a.kv_c_rows, "slot_mapping has {} tokens, kv_c has only {} rows",
                          a.num_tokens, a.kv_c_rows) &&
         refusals.require(a.num_tokens <= a.k_pe_rows, "slot_mapping has {} tokens, k_pe has only {} rows",
                          a.num_tokens, a.k_pe_rows);
}

/// Ranks of both inputs and the cache, dtypes of the inputs.
template <class Args>
bool mla_types_acceptable(const Args& a, int32_t input_dtype, Refusals& refusals) {
  return refusals.rank("kv_c", a.kv_c, 2) && refusals.rank("k_pe", a.k_pe, 2) && refusals.rank("cache", a.cache, 3) &&
         refusals.dtype("kv_c", a.kv_c, input_dtype) && refusals.dtype("k_pe", a.k_pe, input_dtype);
}

/// The units that strides are multiples of, and what a slot holds.
struct MlaEntry {
  int64_t input_bytes;  // of an element
  int64_t cache_bytes;  // of what is stored in one piece
  int64_t bytes;
  Name plural;          // "entries"
};

/// Strides, extents, addresses and overlaps. Sizes must be acceptable; `scale` may be absent.
template <class Args>
bool mla_memory_acceptable(const Args& a, const pf_array& scale, const MlaEntry& entry, Refusals& refusals) {
  const int64_t in = entry.input_bytes;
  const int64_t out = entry.cache_bytes;
  const bool strides =
      (a.kv_c_rows <= 1 || refusals.stride("kv_c_row_stride_bytes", a.kv_c_row_stride_bytes, in)) &&
      (a.k_pe_rows <= 1 || refusals.stride("k_pe_row_stride_bytes", a.k_pe_row_stride_bytes, in)) &&
      (a.num_pages <= 1 || refusals.stride("page_stride_bytes", a.page_stride_bytes, out)) &&
      (a.page_size_tokens <= 1 || refusals.stride("slot_stride_bytes", a.slot_stride_bytes, out));
  if (!strides) return false;

  // Only the first num_tokens rows count; whether the stride does is up to all of them.
  const Dimensions kv_c = {{a.num_tokens, a.kv_c_row_stride_bytes}};
  const Dimensions k_pe = {{a.num_tokens, a.k_pe_row_stride_bytes}};
  const Dimensions cache = {{a.num_pages, a.page_stride_bytes}, {a.page_size_tokens, a.slot_stride_bytes}};
  return refusals.extent("kv_c", a.kv_c, extent_of(kv_c, a.kv_c_elements * in)) &&
         refusals.extent("k_pe", a.k_pe, extent_of(k_pe, a.k_pe_elements * in)) &&
         refusals.extent("slot_mapping", a.slot_mapping, a.num_tokens * 8) &&
         refusals.optional_extent("scale", scale, 4) &&
         refusals.extent("cache", a.cache, extent_of(cache, entry.bytes)) &&
         refusals.optional_extent("counts", a.counts, 16) && refusals.base("kv_c", a.kv_c, in) &&
         refusals.base("k_pe", a.k_pe, in) && refusals.base("slot_mapping", a.slot_mapping, 8) &&
         refusals.base("scale", scale, 4) && refusals.base("cache", a.cache, out) &&
         refusals.base("counts", a.counts, 8) &&
         refusals.require(nests(cache, entry.bytes),
                          "cache does not nest: with strides of {} and {} bytes {} of {} bytes overlap",
                          a.page_stride_bytes, a.slot_stride_bytes, entry.plural, entry.bytes) &&
         refusals.disjoint("cache", a.cache, "kv_c", a.kv_c) && refusals.disjoint("cache", a.cache, "k_pe", a.k_pe) &&
         refusals.disjoint("cache", a.cache, "slot_mapping", a.slot_mapping) &&
         refusals.disjoint("cache", a.cache, "scale", scale) && refusals.disjoint("cache", a.cache, "counts", a.counts);
}

}  // namespace pf
