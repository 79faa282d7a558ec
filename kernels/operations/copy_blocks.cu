// (e) copy_blocks: copies pages of one cache to other pages of it, in every layer.

#include "common/nesting.h"
#include "common/object.h"
#include "common/page_moves.h"
#include "common/refusals.h"

extern "C" {
// pagefuzz-abi: begin

typedef struct pf_copy_blocks_args {
  int64_t struct_bytes;  /* sizeof(pf_copy_blocks_args) */
  pf_array pairs;        /* [num_pairs, 2] int64 (source page, destination page) in host memory: rank 2;
                            read before the launcher returns */
  pf_array cache;        /* [num_layers, num_pages, page_bytes] of elements of element_bytes: rank 3 */
  pf_array scratch;      /* page_bytes of such elements: rank 1, optional; used if pairs hold a cycle */
  pf_array counts;       /* [2] int64 (padding, skipped), optional: rank 1 */
  int64_t num_pairs;
  int64_t num_layers;
  int64_t num_pages;
  int64_t layer_stride_bytes;
  int64_t page_stride_bytes;
  int64_t page_bytes;    /* of payload, a multiple of element_bytes */
  int64_t element_bytes; /* 1, 2, 4 or 8 */
  void *stream;
} pf_copy_blocks_args;

/* schedule: page
 * contains: yes
 * summary: a chunk of a page a CTA, all pages that no other copy reads at once, cycles page by page
 */
int pf_copy_blocks_page(const pf_copy_blocks_args *args, pf_message *message);

// pagefuzz-abi: end
}

namespace {

using Args = pf_copy_blocks_args;
using pf::counted;
using pf::index64;

// Ids of the buffers: positions of the pf_arrays in Args.
enum Buffer : int { kPairs, kCache, kScratch, kCounts };

// ---- launchers' side --------------------------------------------------------------------------------

bool acceptable(const Args& a, pf_message* message) {
  pf::say(message, "");
  pf::Refusals refusals(message);
  const int64_t unit = a.element_bytes;
  const bool scalars =
      refusals.struct_size(a.struct_bytes, sizeof(Args)) &&
      refusals.element_bytes(unit) && refusals.count("num_pairs", a.num_pairs) &&
      refusals.count("num_layers", a.num_layers) && refusals.count("num_pages", a.num_pages) &&
      pf::page_bytes_acceptable(a.page_bytes, unit, refusals);
  if (!scalars) return false;

  const bool has_scratch = !pf::absent(a.scratch);
  const bool types =
      refusals.rank("pairs", a.pairs, 2) && refusals.dtype("pairs", a.pairs, PF_I64) &&
      refusals.rank("cache", a.cache, 3) && refusals.element_size("cache", a.cache, unit) &&
      (!has_scratch || (refusals.rank("scratch", a.scratch, 1) && refusals.element_size("scratch", a.scratch, unit))) &&
      refusals.optional_vector("counts", a.counts, PF_I64);
  if (!types) return false;

  const bool strides =
      (a.num_layers <= 1 || refusals.stride("layer_stride_bytes", a.layer_stride_bytes, unit)) &&
      (a.num_pages <= 1 || refusals.stride("page_stride_bytes", a.page_stride_bytes, unit));
  if (!strides) return false;

  const pf::Dimensions cache = {{a.num_layers, a.layer_stride_bytes}, {a.num_pages, a.page_stride_bytes}};
  return refusals.extent("pairs", a.pairs, pf::Extent(a.num_pairs) * 16) &&
         refusals.extent("cache", a.cache, pf::extent_of(cache, a.page_bytes)) &&
         (!has_scratch || refusals.extent("scratch", a.scratch, 0)) &&
         refusals.optional_extent("counts", a.counts, 16) && refusals.base("pairs", a.pairs, 8) &&
         refusals.base("cache", a.cache, unit) && refusals.base("scratch", a.scratch, unit) &&
         refusals.base("counts", a.counts, 8) &&
         refusals.require(pf::nests(cache, a.page_bytes),
                          "cache does not nest: with strides of {} and {} bytes pages of {} bytes overlap",
                          a.layer_stride_bytes, a.page_stride_bytes, a.page_bytes) &&
         refusals.disjoint("cache", a.cache, "pairs", a.pairs) &&
         refusals.disjoint("cache", a.cache, "counts", a.counts) &&
         refusals.disjoint("scratch", a.scratch, "pairs", a.pairs) &&
         refusals.disjoint("scratch", a.scratch, "counts", a.counts);
}

// The cache's pages and, as page kStaged, the scratch buffer, which all layers share.
struct Pages {
  pf::ReadBytes<kCache> read_cache;
  pf::WriteBytes<kCache> write_cache;
  pf::ReadBytes<kScratch> read_scratch;
  pf::WriteBytes<kScratch> write_scratch;
  index64 layer_stride_bytes;
  index64 page_stride_bytes;
  index64 page_bytes;

  __device__ __forceinline__ index64 offset(int32_t page, index64 layer, index64 at) const {
    return layer * layer_stride_bytes + index64(page) * page_stride_bytes + at;
  }

  template <class Vector>
  __device__ __forceinline__ Vector load(int32_t page, index64 layer, index64 at) const {
    if (page == pf::kStaged) return read_scratch.template load<Vector>(at);
    return read_cache.template load<Vector>(offset(page, layer, at));
  }

  template <class Vector>
  __device__ __forceinline__ void store(int32_t page, index64 layer, index64 at, Vector value) const {
    if (page == pf::kStaged) return write_scratch.template store<Vector>(at, value);
    write_cache.template store<Vector>(offset(page, layer, at), value);
  }
};

pf::PageCopy<Pages> copy_of(const Args& a, bool is_staged, pf_message* message) {
  const int64_t layer_stride = counted(a.layer_stride_bytes, a.num_layers);
  const int64_t page_stride = counted(a.page_stride_bytes, a.num_pages);
  return {
      .pages = {.read_cache = pf::ReadBytes<kCache>(a.cache),
                .write_cache = pf::WriteBytes<kCache>(a.cache),
                .read_scratch = pf::ReadBytes<kScratch>(a.scratch),
                .write_scratch = pf::WriteBytes<kScratch>(a.scratch),
                .layer_stride_bytes = layer_stride,
                .page_stride_bytes = page_stride,
                .page_bytes = a.page_bytes},
      .page_bytes = a.page_bytes,
      .addends = static_cast<uint64_t>(layer_stride | page_stride | a.page_bytes) |
                 reinterpret_cast<uintptr_t>(a.cache.data) |
                 (is_staged ? reinterpret_cast<uintptr_t>(a.scratch.data) : 0),
      .stream = a.stream,
      .message = message,
  };
}

// ---- schedule: page ---------------------------------------------------------------------------------

// Waves in every layer at once. Cycles layer by layer: there is one scratch buffer, and what is in it must be
// read before the next page is staged. The stream keeps the order.
int make_moves(const Args& a, const pf::MoveOrder& order, pf_message* message) {
  int status = PF_OK;
  const pf::PageCopy<Pages> copy = copy_of(a, false, message);
  size_t begin = 0;
  for (const size_t end : order.wave_ends) {
    if (status == PF_OK) status = copy.make(order.waves.data() + begin, order.waves.data() + end, 0, a.num_layers);
    begin = end;
  }
  if (order.cycles.empty()) return status;
  const pf::PageCopy<Pages> staged = copy_of(a, true, message);
  for (int64_t layer = 0; layer < a.num_layers; ++layer) {
    for (const pf::PageMove& move : order.cycles) {
      if (status == PF_OK) status = staged.make(&move, &move + 1, layer, 1);
    }
  }
  return status;
}

int copy_blocks(const Args& a, pf_message* message) {
  pf::PagePairs pairs = pf::page_pairs(a.pairs, a.num_pairs, a.num_pages, a.num_pages);
  pf::Refusals refusals(message);
  if (!pairs.agree(refusals)) return PF_REFUSED;
  const auto is_still = [](const pf::PageMove& move) { return move.from == move.to; };
  pairs.moves.erase(std::remove_if(pairs.moves.begin(), pairs.moves.end(), is_still), pairs.moves.end());
  const pf::MoveOrder order = pf::move_order(pairs.moves);
  const bool fits = order.cycles.empty() || a.scratch.extent_bytes >= a.page_bytes;
  if (!refusals.require(fits, "pairs hold a cycle, for which scratch must have {} bytes; it has {}", a.page_bytes,
                        a.scratch.extent_bytes)) {
    return PF_REFUSED;
  }
  const int status = make_moves(a, order, message);
  return status != PF_OK ? status
                         : pf::add_counts<kCounts>(a.counts, pairs.padding, pairs.skipped, a.stream, message);
}

}  // namespace

PF_EXPORT int pf_copy_blocks_page(const pf_copy_blocks_args* args, pf_message* message) {
  if (!acceptable(*args, message)) return PF_REFUSED;
  return pf::launch_with_lists("no host memory for the order of {} pairs", args->num_pairs, message,
                               [&] { return copy_blocks(*args, message); });
}
