// (source page, destination page) pairs in host memory: which of them move anything, and in what order.
// Host code. The launcher keeps its lists on the host's heap until it returns; no device memory is taken.
#pragma once

#include <algorithm>
#include <new>  // what running out of host memory throws
#include <vector>

#include "common/refusals.h"

namespace pf {

/// A page to copy; num_pages fits an int32.
struct PageMove {
  int32_t from;
  int32_t to;
};

/// Stands for the scratch buffer in a move.
inline constexpr int32_t kStaged = -1;

/// What becomes of the pairs of a launch.
struct PagePairs {
  int64_t padding = 0;          // pairs with a -1 on either side
  int64_t skipped = 0;          // others that name a page that does not exist
  std::vector<PageMove> moves;  // the rest by destination, then source; no pair twice

  /// No page is to become two different ones.
  bool agree(Refusals& refusals) const {
    const auto same = [](const PageMove& a, const PageMove& b) { return a.to == b.to; };
    const auto found = std::adjacent_find(moves.begin(), moves.end(), same);
    return found == moves.end() ||
           refusals.require(false, "pairs copy page {} and page {} to one page, {}", found[0].from, found[1].from,
                            found->to);
  }
};

/// Of payload; `unit` is the bytes of an element.
inline bool page_bytes_acceptable(int64_t page_bytes, int64_t unit, Refusals& refusals) {
  return refusals.in_range("page_bytes", page_bytes, 1, INT32_MAX) &&
         refusals.require(page_bytes % unit == 0, "page_bytes is {}, it must be a multiple of element_bytes = {}",
                          page_bytes, unit);
}

inline PagePairs page_pairs(const pf_array& pairs, int64_t num_pairs, int64_t source_pages,
                            int64_t destination_pages) {
  const auto* ids = static_cast<const int64_t*>(pairs.data);
  PagePairs sorted;
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int64_t from = ids[2 * pair];
    const int64_t to = ids[2 * pair + 1];
    if (from == -1 || to == -1) {
      ++sorted.padding;
    } else if (from < 0 || from >= source_pages || to < 0 || to >= destination_pages) {
      ++sorted.skipped;
    } else {
      sorted.moves.push_back({static_cast<int32_t>(from), static_cast<int32_t>(to)});
    }
  }
  std::vector<PageMove>& moves = sorted.moves;
  std::sort(moves.begin(), moves.end(), [](const PageMove& a, const PageMove& b) {
    return a.to != b.to ? a.to < b.to : a.from < b.from;
  });
  const auto equal = [](const PageMove& a, const PageMove& b) { return a.to == b.to && a.from == b.from; };
  moves.erase(std::unique(moves.begin(), moves.end(), equal), moves.end());
  return sorted;
}

/// What `launch` returns, which keeps its lists on the heap; `otherwise` speaks of the number of pairs.
template <class Launch>
int launch_with_lists(const char* otherwise, int64_t num_pairs, pf_message* message, Launch launch) {
  try {
    return launch();
  } catch (const std::bad_alloc&) {
    say(message, otherwise, num_pairs);
    return PF_LAUNCH_FAILED;
  }
}

/// An order in which no page is written before it has been read.
struct MoveOrder {
  std::vector<PageMove> waves;     // moves of one wave can be made in any order, waves one after another
  std::vector<size_t> wave_ends;   // of each wave in `waves`
  std::vector<PageMove> cycles;    // after all waves, one after another; empty without a cycle
};

/// `moves` are those within one cache: by destination, none of them twice, no page to itself.
///
/// A move can be made once nobody is left to read its destination. Moves for which that never happens form
/// cycles, of which each stages one page: kStaged as the destination of its first move and the source of
/// its last.
inline MoveOrder move_order(const std::vector<PageMove>& moves) {
  const size_t count = moves.size();
  const size_t none = count;
  std::vector<size_t> writer(count, none);  // of each move, the move that writes over its source
  std::vector<size_t> readers(count, 0);    // of each move, those not made yet that read its destination
  for (size_t move = 0; move < count; ++move) {
    const auto at = std::lower_bound(moves.begin(), moves.end(), moves[move].from,
                                     [](const PageMove& one, int32_t page) { return one.to < page; });
    if (at == moves.end() || at->to != moves[move].from) continue;
    writer[move] = static_cast<size_t>(at - moves.begin());
    ++readers[writer[move]];
  }

  MoveOrder order;
  std::vector<size_t> ready;
  std::vector<bool> made(count, false);
  for (size_t move = 0; move < count; ++move) {
    if (readers[move] == 0) ready.push_back(move);
  }
  while (!ready.empty()) {
    std::vector<size_t> next;
    for (const size_t move : ready) {
      order.waves.push_back(moves[move]);
      made[move] = true;
      if (writer[move] != none && --readers[writer[move]] == 0) next.push_back(writer[move]);
    }
    order.wave_ends.push_back(order.waves.size());
    ready = std::move(next);
  }

  for (size_t first = 0; first < count; ++first) {
    if (made[first]) continue;
    order.cycles.push_back({moves[first].to, kStaged});
    for (size_t move = first; !made[move]; move = writer[move]) {
      const bool is_last = writer[move] == first;
      order.cycles.push_back({is_last ? kStaged : moves[move].from, moves[move].to});
      made[move] = true;
    }
  }
  return order;
}

}  // namespace pf
