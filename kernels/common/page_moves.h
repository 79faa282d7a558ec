// Copies pages by a list of moves that travels to the kernel in its parameters, so that a launch under graph
// capture needs neither device memory for the list nor a copy of it.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "common/page_pairs.h"
#include "common/vectors.h"
#include "common/views.h"

namespace pf {

inline constexpr int kPageThreads = 256;
inline constexpr int64_t kPageChunkBytes = 16384;  // of a page, for one CTA at a time

/// Moves of one launch: with everything else below the 4 KiB that all architectures take as parameters.
inline constexpr int kMovesPerLaunch = 448;

struct MoveBatch {
  int32_t count;
  PageMove moves[kMovesPerLaunch];
};

/// Layers that a launch makes its moves in.
struct Layers {
  index64 first;
  index64 count;
};

/// `Pages` knows where page ids lie: load<Vector>(page, layer, byte) of a source, store of a destination.
/// Moves of a batch are made in any order: none may write what another one reads.
template <class Vector, class Pages>
__global__ void __launch_bounds__(kPageThreads) copy_pages(Pages pages, MoveBatch batch, Layers layers) {
  const index64 page_bytes = pages.page_bytes;
  const index64 chunks = (page_bytes + (kPageChunkBytes - 1)) / kPageChunkBytes;
  const index64 tasks = chunks * layers.count * batch.count;
  for (index64 task = blockIdx.x; task < tasks; task += gridDim.x) {
    const index64 begin = task % chunks * kPageChunkBytes;
    const index64 end = least(begin + kPageChunkBytes, page_bytes);
    const index64 nth = task / chunks;
    const index64 layer = layers.first + nth % layers.count;
    const PageMove move = batch.moves[narrow<int32_t>(nth / layers.count)];
    const index64 lane = threadIdx.x;
    const index64 step = index64(blockDim.x) * static_cast<int64_t>(sizeof(Vector));
    for (index64 at = begin + lane * static_cast<int64_t>(sizeof(Vector)); at < end; at += step) {
      pages.template store<Vector>(move.to, layer, at, pages.template load<Vector>(move.from, layer, at));
    }
  }
}

static_assert(sizeof(MoveBatch) <= 3592);  // which leaves 500 bytes for pages and layers

/// What every launch of an operation's moves has in common.
///
/// addends  bitwise or of everything that addresses are sums of
template <class Pages>
struct PageCopy {
  Pages pages;
  int64_t page_bytes;
  uint64_t addends;
  void* stream;
  pf_message* message;

  /// Makes moves [begin, end), in any order, in layers [first_layer, first_layer + num_layers).
  int make(const PageMove* begin, const PageMove* end, int64_t first_layer, int64_t num_layers) const {
    int status = PF_OK;
    while (begin < end && num_layers > 0 && status == PF_OK) {
      const auto count = std::min<int64_t>(end - begin, kMovesPerLaunch);
      status = make_batch(begin, count, first_layer, num_layers);
      begin += count;
    }
    return status;
  }

 private:
  int make_batch(const PageMove* moves, int64_t count, int64_t first_layer, int64_t num_layers) const {
    MoveBatch batch = {};
    batch.count = static_cast<int32_t>(count);
    std::copy(moves, moves + count, batch.moves);
    return by_vector_bytes(widest_vector_bytes(addends), [&](auto vector) {
      using Vector = typename decltype(vector)::type;
      constexpr int64_t kBytes = sizeof(Vector);
      const int64_t threads =
          power_of_two_at_least(std::min(page_bytes, kPageChunkBytes) / kBytes, 32, kPageThreads);
      const int64_t chunks = (page_bytes + kPageChunkBytes - 1) / kPageChunkBytes;
      const int64_t ctas = std::min(chunks * num_layers * count, resident_ctas(threads));
      const LaunchShape shape = {.grid = dim3(static_cast<unsigned>(ctas)),
                                 .block = dim3(static_cast<unsigned>(threads))};
      return launch(copy_pages<Vector, Pages>, shape, stream, message, pages, batch, Layers{first_layer, num_layers});
    });
  }
};

/// Adds the padding and skipped pairs, of which only the host knows.
template <int kCounts>
__global__ void count_pairs(CounterView<kCounts> counts, index64 padding, index64 skipped) {
  counts.add(0, padding);
  counts.add(1, skipped);
}

template <int kCounts>
int add_counts(const pf_array& counts, int64_t padding, int64_t skipped, void* stream, pf_message* message) {
  if (counts.data == nullptr || (padding == 0 && skipped == 0)) return PF_OK;
  return launch(count_pairs<kCounts>, {.grid = dim3(1), .block = dim3(1)}, stream, message,
                CounterView<kCounts>(counts), padding, skipped);
}

}  // namespace pf
