// Groups of bf16 that a writer stores as E4M3 with a scale of their own: one warp a group.
#pragma once

#include <algorithm>

#include "common/codecs.h"
#include "common/launch.h"

namespace pf {

/// scale_kind of a writer's arguments.
enum ScaleKind : int64_t { kPlainScale = 0, kPow2Scale = 1 };

inline constexpr float kLargestE4M3 = 448.0f;
inline constexpr float kSmallScale = 1e-4f;

inline constexpr int kGroupLanes = 32;
inline constexpr int kGroupsPerCta = 8;
inline constexpr int kGroupThreads = kGroupLanes * kGroupsPerCta;

/// The largest magnitude among `bytes` bytes of bf16, which a warp reads together; every lane gets it. NaNs
/// are left out: without a sign, larger bits are larger numbers, and NaNs lie above infinity.
template <class Codec, class Source>
__device__ __forceinline__ float warp_amax(const Source& source, index64 from, index64 bytes, index64 lane) {
  using In = typename Codec::In;
  constexpr int kElements = static_cast<int>(sizeof(In) / sizeof(uint16_t));
  constexpr unsigned kInfinity = 0x7F80u;
  const index64 steps = bytes / static_cast<int64_t>(sizeof(In));
  unsigned largest = 0;
  for (index64 step = lane; step < steps; step += kGroupLanes) {
    const In in = source.template load<In>(from + step * static_cast<int64_t>(sizeof(In)));
    uint16_t elements[kElements];
    memcpy(elements, &in, sizeof(in));
    for (int i = 0; i < kElements; ++i) {
      const unsigned magnitude = elements[i] & 0x7FFFu;
      if (magnitude <= kInfinity && magnitude > largest) largest = magnitude;
    }
  }
  return fp32_of_bf16(static_cast<uint16_t>(__reduce_max_sync(~0u, largest)));
}

/// The least power of two that is not below a positive, normal number; infinity stays.
__device__ __forceinline__ float power_of_two_not_below(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t mantissa = bits & ((1u << kMantissa32) - 1);
  return float_of(mantissa == 0 ? bits : bits - mantissa + (1u << kMantissa32));
}

/// The larger one; neither is a NaN.
__device__ __forceinline__ float larger(float a, float b) { return a < b ? b : a; }

/// What `choose` returns for the widest codec of bf16 that alignment allows.
template <class Choose>
auto by_group_codec(Addends addends, Choose choose) {
  switch (widest_vector_bytes(addends.read | addends.written * sizeof(uint16_t))) {
    case 16: return choose(QuantiseCodec<E4M3, FromBF16, 8>{});
    case 8: return choose(QuantiseCodec<E4M3, FromBF16, 4>{});
    case 4: return choose(QuantiseCodec<E4M3, FromBF16, 2>{});
    default: return choose(QuantiseCodec<E4M3, FromBF16, 1>{});
  }
}

/// A warp for each of `tasks`, as far as they fit on the device at once.
inline LaunchShape group_shape(int64_t tasks) {
  const int64_t ctas = std::min((tasks - 1) / kGroupsPerCta + 1, resident_ctas(kGroupThreads));
  return {.grid = dim3(static_cast<unsigned>(ctas)), .block = dim3(kGroupLanes, kGroupsPerCta)};
}

}  // namespace pf
