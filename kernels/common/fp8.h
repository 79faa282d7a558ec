// Conversions between fp8, fp16, bf16 and fp32, round to nearest even, in integer and plain fp32 arithmetic.
//
// Both targets give the same bits, NaN aside: no fp32 subnormal takes part on the way, nothing is flushed to
// zero, and no instruction of one target is used. Values other than fp32 are their bits.
#pragma once

#include <cstring>

#include "common/target.h"

namespace pf {

__host__ __device__ __forceinline__ uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

__host__ __device__ __forceinline__ float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline constexpr uint32_t kInfinity32 = 0x7F800000u;
inline constexpr uint32_t kQuietNan32 = 0x7FC00000u;
inline constexpr int kMantissa32 = 23;
inline constexpr int kBias32 = 127;

/// A format with a sign, fewer mantissa bits than fp32, and a smaller exponent.
template <int kMantissaBits, int kExponentBias>
struct SmallFloat {
  static constexpr int kMantissa = kMantissaBits;
  static constexpr int kBias = kExponentBias;

  /// fp32 bits of a magnitude that is finite. Exponent 0 is read as a normal of exponent 1, less the 1 that
  /// it has too much: exact, and without an fp32 subnormal.
  static __host__ __device__ __forceinline__ uint32_t widened(uint32_t magnitude) {
    constexpr uint32_t kOne = static_cast<uint32_t>(kBias32 - kBias + 1) << kMantissa32;  // least normal value
    const uint32_t shifted = magnitude << (kMantissa32 - kMantissa);
    const uint32_t normal = shifted + (static_cast<uint32_t>(kBias32 - kBias) << kMantissa32);
    return magnitude >> kMantissa ? normal : bits_of(float_of(shifted + kOne) - float_of(kOne));
  }

  /// The magnitude nearest to fp32 bits without a sign that are finite; beyond the exponents it overflows into
  /// larger codes, in order.
  static __host__ __device__ __forceinline__ uint32_t rounded(uint32_t bits) {
    constexpr uint32_t kLeastNormal = static_cast<uint32_t>(kBias32 - kBias + 1) << kMantissa32;
    constexpr int kDropped = kMantissa32 - kMantissa;
    if (bits >= kLeastNormal) {
      const uint32_t based = bits - (static_cast<uint32_t>(kBias32 - kBias) << kMantissa32);
      return (based + ((1u << (kDropped - 1)) - 1 + (based >> kDropped & 1))) >> kDropped;
    }
    // In units of the least subnormal, 2^(1 - kBias - kMantissa): significand >> shift.
    const int shift = kBias32 - kBias + 1 + kDropped - static_cast<int>(bits >> kMantissa32);
    if (shift > kMantissa32 + 1) return 0;  // below half a unit
    const uint32_t significand = (bits & ((1u << kMantissa32) - 1)) | 1u << kMantissa32;
    const uint32_t half = 1u << (shift - 1);
    return (significand + (half - 1 + (significand >> shift & 1))) >> shift;
  }
};

/// fn: no infinities, 0x7F and 0xFF are NaN, the largest is 448.
struct E4M3 : SmallFloat<3, 7> {
  static constexpr uint32_t kLargest = 0x7E;
  static constexpr uint32_t kLargest32 = 0x43E00000u;

  static __host__ __device__ __forceinline__ float decode(uint8_t code) {
    const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
    const uint32_t magnitude = code & 0x7Fu;
    return float_of(sign | (magnitude == 0x7F ? kQuietNan32 : widened(magnitude)));
  }
};

/// Infinities and NaNs are read; the largest is 57344.
struct E5M2 : SmallFloat<2, 15> {
  static constexpr uint32_t kLargest = 0x7B;
  static constexpr uint32_t kLargest32 = 0x47600000u;

  static __host__ __device__ __forceinline__ float decode(uint8_t code) {
    const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
    const uint32_t magnitude = code & 0x7Fu;
    const uint32_t special = magnitude == 0x7C ? kInfinity32 : kQuietNan32;
    return float_of(sign | (magnitude >= 0x7C ? special : widened(magnitude)));
  }
};

/// fp32 -> fp8 in one rounding. Saturates, infinities too; a NaN stays one.
template <class Format>
__host__ __device__ __forceinline__ uint8_t encode_fp8(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = bits >> 24 & 0x80u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t code = 0x7F;
  if (magnitude <= kInfinity32) {
    code = magnitude >= Format::kLargest32 ? Format::kLargest : Format::rounded(magnitude);
  }
  return static_cast<uint8_t>(sign | code);
}

/// value / divisor as IEEE says, subnormals included.
__host__ __device__ __forceinline__ float divided(float value, float divisor) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(value, divisor);  // whatever the flags say of `/`
#else
  return value / divisor;
#endif
}

/// What a writer stores: value / scale by an IEEE division, then one rounding.
template <class Format>
__host__ __device__ __forceinline__ uint8_t quantised_fp8(float value, float scale) {
  return encode_fp8<Format>(divided(value, scale));
}

/// fp32 -> fp16; overflows to infinity.
__host__ __device__ __forceinline__ uint16_t fp16_of(float value) {
  using Format = SmallFloat<10, 15>;
  const uint32_t bits = bits_of(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  constexpr uint32_t kOverflows = 0x477FF000u;  // 65520, the tie between 65504 and 2^16
  uint32_t code = magnitude > kInfinity32 ? 0x7E00u : 0x7C00u;
  if (magnitude < kOverflows) code = Format::rounded(magnitude);
  return static_cast<uint16_t>(sign | code);
}

/// fp16 -> fp32, exact.
__host__ __device__ __forceinline__ float fp32_of_fp16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  const uint32_t special = kInfinity32 | (magnitude & 0x3FFu) << 13;
  return float_of(sign | (magnitude >= 0x7C00 ? special : SmallFloat<10, 15>::widened(magnitude)));
}

/// fp32 -> bf16; rounds to infinity beyond the largest.
__host__ __device__ __forceinline__ uint16_t bf16_of(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7FFFFFFFu) > kInfinity32) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + (0x7FFFu + (bits >> 16 & 1u))) >> 16);
}

/// bf16 -> fp32, exact.
__host__ __device__ __forceinline__ float fp32_of_bf16(uint16_t value) {
  return float_of(static_cast<uint32_t>(value) << 16);
}

}  // namespace pf
