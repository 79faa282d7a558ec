// (e) swap_blocks: copies pages of a source cache to pages of another cache. Nothing is exchanged.

#include "common/nesting.h"
#include "common/object.h"
#include "common/page_moves.h"
#include "common/refusals.h"

extern "C" {
// pagefuzz-abi: begin

typedef struct pf_swap_blocks_args {
  int64_t struct_bytes;  /* sizeof(pf_swap_blocks_args) */
  pf_array pairs;        /* [num_pairs, 2] int64 (page of src_cache, page of dst_cache) in host memory: rank 2;
                            read before the launcher returns */
  pf_array src_cache;    /* [src_num_pages, page_bytes] of elements of element_bytes: rank 2 */
  pf_array dst_cache;    /* [dst_num_pages, page_bytes] of such elements: rank 2 */
  pf_array counts;       /* [2] int64 (padding, skipped), optional: rank 1 */
  int64_t num_pairs;
  int64_t src_num_pages;
  int64_t dst_num_pages;
  int64_t src_page_stride_bytes;
  int64_t dst_page_stride_bytes;
  int64_t page_bytes;    /* of payload, a multiple of element_bytes */
  int64_t element_bytes; /* 1, 2, 4 or 8 */
  void *stream;
} pf_swap_blocks_args;

/* schedule: page
 * contains: yes
 * summary: a chunk of a page a CTA, all pages at once
 */
int pf_swap_blocks_page(const pf_swap_blocks_args *args, pf_message *message);

// pagefuzz-abi: end
}

namespace {

using Args = pf_swap_blocks_args;
using pf::counted;
using pf::index64;

// Ids of the buffers: positions of the pf_arrays in Args.
enum Buffer : int { kPairs, kSrcCache, kDstCache, kCounts };

// ---- launchers' side --------------------------------------------------------------------------------

bool acceptable(const Args& a, pf_message* message) {
  pf::say(message, "");
  pf::Refusals refusals(message);
  const int64_t unit = a.element_bytes;
  const bool scalars =
      refusals.struct_size(a.struct_bytes, sizeof(Args)) &&
      refusals.element_bytes(unit) && refusals.count("num_pairs", a.num_pairs) &&
      refusals.count("src_num_pages", a.src_num_pages) && refusals.count("dst_num_pages", a.dst_num_pages) &&
      pf::page_bytes_acceptable(a.page_bytes, unit, refusals);
  if (!scalars) return false;

  const bool types =
      refusals.rank("pairs", a.pairs, 2) && refusals.dtype("pairs", a.pairs, PF_I64) &&
      refusals.rank("src_cache", a.src_cache, 2) && refusals.element_size("src_cache", a.src_cache, unit) &&
      refusals.rank("dst_cache", a.dst_cache, 2) && refusals.element_size("dst_cache", a.dst_cache, unit) &&
      refusals.optional_vector("counts", a.counts, PF_I64);
  if (!types) return false;

  const bool strides =
      (a.src_num_pages <= 1 || refusals.stride("src_page_stride_bytes", a.src_page_stride_bytes, unit)) &&
      (a.dst_num_pages <= 1 || refusals.stride("dst_page_stride_bytes", a.dst_page_stride_bytes, unit));
  if (!strides) return false;

  const pf::Dimensions src = {{a.src_num_pages, a.src_page_stride_bytes}};
  const pf::Dimensions dst = {{a.dst_num_pages, a.dst_page_stride_bytes}};
  return refusals.extent("pairs", a.pairs, pf::Extent(a.num_pairs) * 16) &&
         refusals.extent("src_cache", a.src_cache, pf::extent_of(src, a.page_bytes)) &&
         refusals.extent("dst_cache", a.dst_cache, pf::extent_of(dst, a.page_bytes)) &&
         refusals.optional_extent("counts", a.counts, 16) && refusals.base("pairs", a.pairs, 8) &&
         refusals.base("src_cache", a.src_cache, unit) && refusals.base("dst_cache", a.dst_cache, unit) &&
         refusals.base("counts", a.counts, 8) &&
         refusals.require(pf::nests(dst, a.page_bytes),
                          "dst_cache does not nest: with a stride of {} bytes pages of {} bytes overlap",
                          a.dst_page_stride_bytes, a.page_bytes) &&
         refusals.disjoint("dst_cache", a.dst_cache, "pairs", a.pairs) &&
         refusals.disjoint("dst_cache", a.dst_cache, "src_cache", a.src_cache) &&
         refusals.disjoint("dst_cache", a.dst_cache, "counts", a.counts);
}

struct Pages {
  pf::ReadBytes<kSrcCache> src;
  pf::WriteBytes<kDstCache> dst;
  index64 src_page_stride_bytes;
  index64 dst_page_stride_bytes;
  index64 page_bytes;

  template <class Vector>
  __device__ __forceinline__ Vector load(int32_t page, index64, index64 at) const {
    return src.template load<Vector>(index64(page) * src_page_stride_bytes + at);
  }

  template <class Vector>
  __device__ __forceinline__ void store(int32_t page, index64, index64 at, Vector value) const {
    dst.template store<Vector>(index64(page) * dst_page_stride_bytes + at, value);
  }
};

pf::PageCopy<Pages> copy_of(const Args& a, pf_message* message) {
  const int64_t src_stride = counted(a.src_page_stride_bytes, a.src_num_pages);
  const int64_t dst_stride = counted(a.dst_page_stride_bytes, a.dst_num_pages);
  return {
      .pages = {.src = pf::ReadBytes<kSrcCache>(a.src_cache),
                .dst = pf::WriteBytes<kDstCache>(a.dst_cache),
                .src_page_stride_bytes = src_stride,
                .dst_page_stride_bytes = dst_stride,
                .page_bytes = a.page_bytes},
      .page_bytes = a.page_bytes,
      .addends = static_cast<uint64_t>(src_stride | dst_stride | a.page_bytes) |
                 reinterpret_cast<uintptr_t>(a.src_cache.data) | reinterpret_cast<uintptr_t>(a.dst_cache.data),
      .stream = a.stream,
      .message = message,
  };
}

// ---- schedule: page ---------------------------------------------------------------------------------

int swap_blocks(const Args& a, pf_message* message) {
  const pf::PagePairs pairs = pf::page_pairs(a.pairs, a.num_pairs, a.src_num_pages, a.dst_num_pages);
  pf::Refusals refusals(message);
  if (!pairs.agree(refusals)) return PF_REFUSED;
  const pf::PageMove* moves = pairs.moves.data();
  const int status = copy_of(a, message).make(moves, moves + pairs.moves.size(), 0, 1);
  return status != PF_OK ? status
                         : pf::add_counts<kCounts>(a.counts, pairs.padding, pairs.skipped, a.stream, message);
}

}  // namespace

PF_EXPORT int pf_swap_blocks_page(const pf_swap_blocks_args* args, pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  return pf::launch_with_lists("no host memory for {} pairs", args->num_pairs, message,
                               [&] { return swap_blocks(*args, message); });
}
