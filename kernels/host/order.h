// The order in which CTAs, and the threads of each, take their turns.
#pragma once

#include <cstdint>

#include "common/abi.h"

namespace pf::host {

// A permutation of [0, count) that needs no memory, whatever the count.
class Order {
 public:
  Order(int32_t kind, uint64_t seed, uint64_t count) : kind_(kind), seed_(seed), count_(count) {
    while ((uint64_t{1} << (2 * half_bits_)) < count_) ++half_bits_;
  }

  /// The index whose turn is `turn`, both in [0, count).
  uint64_t at(uint64_t turn) const {
    switch (kind_) {
      case PF_ORDER_REVERSE:
        return count_ - 1 - turn;
      case PF_ORDER_SHUFFLED:
        // Feistel rounds permute a power of four; walking the cycle stays inside [0, count).
        do turn = scrambled(turn);
        while (turn >= count_);
        return turn;
      case PF_ORDER_WARP_INTERLEAVED:
        return interleaved(turn);
      default:
        return turn;
    }
  }

 private:
  static constexpr uint64_t kWarp = 32;

  uint64_t scrambled(uint64_t value) const {
    const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
    uint64_t left = value >> half_bits_;
    uint64_t right = value & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      uint64_t hash = (right + 1) * 0x9E3779B97F4A7C15ull + seed_ * 0xBF58476D1CE4E5B9ull + round;
      hash ^= hash >> 29;
      hash *= 0x94D049BB133111EBull;
      hash ^= hash >> 32;
      const uint64_t next = left ^ (hash & mask);
      left = right;
      right = next;
    }
    return left << half_bits_ | right;
  }

  // Lane 0 of every group of 32, then lane 1 of every group, ...; the last group may be short.
  uint64_t interleaved(uint64_t turn) const {
    const uint64_t groups = (count_ + kWarp - 1) / kWarp;
    const uint64_t lanes_of_last = count_ - (groups - 1) * kWarp;
    if (turn < lanes_of_last * groups) return turn % groups * kWarp + turn / groups;
    turn -= lanes_of_last * groups;
    return turn % (groups - 1) * kWarp + lanes_of_last + turn / (groups - 1);
  }

  int32_t kind_;
  uint64_t seed_;
  uint64_t count_;
  unsigned half_bits_ = 0;
};

inline int32_t order_kind = PF_ORDER_FORWARD;
inline uint64_t order_seed = 0;

}  // namespace pf::host
