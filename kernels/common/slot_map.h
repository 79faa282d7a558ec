// Where each token's entry goes: the slot mapping that every writer shares.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "common/vectors.h"
#include "common/views.h"

namespace pf {

/// Why a token's entry is not written.
enum class Unwritten : int { kNo, kPadding, kSkipped };

struct TokenSlot {
  index64 page;
  index64 offset;  // in the page, in tokens
  Unwritten unwritten;
};

/// slot_mapping[t] is a slot of the whole cache, page * page_size_tokens + offset; -1 is padding.
template <int kSlotMapping>
struct SlotMap {
  ReadView<int64_t, kSlotMapping> slots;
  index64 num_tokens;
  index64 num_pages;
  index64 page_size_tokens;

  template <class Args>
  static SlotMap of(const Args& a) {
    return {.slots = ReadView<int64_t, kSlotMapping>(a.slot_mapping),
            .num_tokens = a.num_tokens,
            .num_pages = a.num_pages,
            .page_size_tokens = a.page_size_tokens};
  }

  /// `token` must lie in [0, num_tokens). Tested before it is divided: -1 / size is page 0, offset -1.
  __device__ __forceinline__ TokenSlot at(index64 token) const {
    const index64 slot = slots.load(token);
    if (slot == -1) return {0, 0, Unwritten::kPadding};
    if (slot < 0 || slot >= num_pages * page_size_tokens) return {0, 0, Unwritten::kSkipped};
    return {slot / page_size_tokens, slot % page_size_tokens, Unwritten::kNo};
  }
};

/// The counter pair of a writer: tokens of padding, tokens whose slot does not exist.
template <int kCounts>
class SlotCounts {
 public:
  explicit SlotCounts(const pf_array& array) : pair_(array) {}

  /// Counts a token that is not written; one thread a token.
  __device__ __forceinline__ void add(const TokenSlot& slot) const {
    if (pair_.present()) pair_.add(slot.unwritten == Unwritten::kPadding ? 0 : 1, 1);
  }

 private:
  CounterView<kCounts> pair_;
};

inline constexpr int kTokenThreads = 256;

/// CTAs of rows of threads (x), each row for one token at a time: as long as `steps`, the longest run of a
/// token, can use. All tokens on x: the other axes end at 65,535.
inline LaunchShape token_shape(int64_t num_tokens, int64_t steps) {
  const int64_t lanes = power_of_two_at_least(steps, 32, kTokenThreads);
  const int64_t rows = kTokenThreads / lanes;
  const int64_t ctas = std::min((num_tokens + rows - 1) / rows, resident_ctas(kTokenThreads));
  return {.grid = dim3(static_cast<unsigned>(ctas)),
          .block = dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(rows))};
}

}  // namespace pf
