// Pages of indexer keys: all key bytes come first, flat or in tiles, then all scales. What their sizes must be,
// and where a key lies. `Args` is any args struct with the members that cp_gather_indexer_k_quant_cache's has.
#pragma once

#include "common/index.h"
#include "common/refusals.h"

namespace pf {

inline constexpr int64_t kTile = 16;  // tokens, and key bytes of each, in a tile of page_layout 1

template <class Args>
bool indexer_key_acceptable(const Args& a, Refusals& refusals) {
  return refusals.require(a.head_dim >= 16 && a.head_dim <= 1024 && a.head_dim % 16 == 0,
                          "head_dim is {}, it must be a multiple of 16 in 16..1024", a.head_dim) &&
         refusals.require(a.quant_block > 0 && a.head_dim % a.quant_block == 0,
                          "quant_block is {}, it must divide head_dim = {}", a.quant_block, a.head_dim);
}

template <class Args>
bool indexer_page_acceptable(const Args& a, Refusals& refusals) {
  return refusals.in_range("page_layout", a.page_layout, 0, 1) && refusals.page_size(a.page_size_tokens) &&
         refusals.require(a.page_layout == 0 || a.page_size_tokens % kTile == 0,
                          "page_size_tokens is {}, page_layout 1 needs a multiple of 16", a.page_size_tokens);
}

/// Words stay aligned in every page, and no two pages share a byte.
template <class Args>
bool indexer_page_stride_acceptable(const Args& a, int64_t page_bytes, Refusals& refusals) {
  return a.num_pages <= 1 ||
         (refusals.stride("page_stride_bytes", a.page_stride_bytes, 4) &&
          refusals.require(a.page_stride_bytes >= page_bytes, "page_stride_bytes is {}: a page takes {} bytes",
                           a.page_stride_bytes, page_bytes));
}

/// Where byte `at` of a slot's keys lies, from the first byte of its page.
__device__ __forceinline__ index64 indexer_key_offset(bool tiled, index64 head_dim, index64 slot, index64 at) {
  if (!tiled) return slot * head_dim + at;
  return slot / kTile * kTile * head_dim + at / kTile * (kTile * kTile) + slot % kTile * kTile + at % kTile;
}

}  // namespace pf
