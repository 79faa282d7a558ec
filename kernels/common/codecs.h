// What a writer stores of the elements it is given: their bits, or fp8 codes of them.
//
// A codec turns one load (In) into one store (Out). Both are whole elements wide, so that where two tokens
// write one slot no element is torn.
#pragma once

#include "common/fp8.h"
#include "common/vectors.h"
#include "common/views.h"

namespace pf {

/// kv_dtype of a writer's arguments.
enum KvDtype : int64_t { kAuto = 0, kFp8E4M3 = 1, kFp8E5M2 = 2 };

/// The dtype code of the format.
inline int32_t fp8_dtype(int64_t kv_dtype) { return kv_dtype == kFp8E4M3 ? PF_E4M3 : PF_E5M2; }

/// fp32 of the bits of an element.
struct FromF32 {
  using Element = uint32_t;
  static __device__ __forceinline__ float value(Element bits) { return float_of(bits); }
};
struct FromF16 {
  using Element = uint16_t;
  static __device__ __forceinline__ float value(Element bits) { return fp32_of_fp16(bits); }
};
struct FromBF16 {
  using Element = uint16_t;
  static __device__ __forceinline__ float value(Element bits) { return fp32_of_bf16(bits); }
};

template <class Vector>
struct CopyCodec {
  using In = Vector;
  using Out = Vector;
  static constexpr bool kScaled = false;
  static __device__ __forceinline__ Out convert(In in, float) { return in; }
};

template <class Format, class From, int kElements>
struct QuantiseCodec {
  using Element = typename From::Element;
  using In = typename VectorOf<kElements * static_cast<int>(sizeof(Element))>::type;
  using Out = typename VectorOf<kElements>::type;
  static constexpr bool kScaled = true;

  static __device__ __forceinline__ Out convert(In in, float scale) {
    Element elements[kElements];
    uint8_t codes[kElements];
    memcpy(elements, &in, sizeof(in));
    for (int i = 0; i < kElements; ++i) codes[i] = quantised_fp8<Format>(From::value(elements[i]), scale);
    Out out;
    memcpy(&out, codes, sizeof(out));
    return out;
  }
};

/// What every address of a writer is a sum of, bitwise or-ed: the side that is read, in bytes, and the side
/// that is written.
struct Addends {
  uint64_t read;
  uint64_t written;
};

/// What `choose` returns for the widest codec that alignment allows. kv_dtype and the input's dtype are
/// legal ones.
template <class Choose>
auto by_codec(int64_t kv_dtype, int64_t input_dtype, Addends addends, Choose choose) {
  if (kv_dtype == kAuto) {
    return by_vector_bytes(widest_vector_bytes(addends.read | addends.written), [choose](auto vector) {
      return choose(CopyCodec<typename decltype(vector)::type>{});
    });
  }
  const auto by_format = [=](auto from) {
    using From = decltype(from);
    constexpr int kWide = 16 / static_cast<int>(sizeof(typename From::Element));
    const bool wide = addends.read % 16 == 0 && addends.written % kWide == 0;
    if (kv_dtype == kFp8E4M3) {
      return wide ? choose(QuantiseCodec<E4M3, From, kWide>{}) : choose(QuantiseCodec<E4M3, From, 1>{});
    }
    return wide ? choose(QuantiseCodec<E5M2, From, kWide>{}) : choose(QuantiseCodec<E5M2, From, 1>{});
  };
  if (input_dtype == PF_F32) return by_format(FromF32{});
  if (input_dtype == PF_F16) return by_format(FromF16{});
  return by_format(FromBF16{});
}

/// Stores what a codec makes of `bytes` bytes of input, by `lanes` threads of which this is `lane`.
template <class Codec, class Source, class Target>
__device__ __forceinline__ void store_run(const Source& source, index64 from, index64 bytes, const Target& target,
                                          index64 to, float scale, index64 lane, index64 lanes) {
  using In = typename Codec::In;
  using Out = typename Codec::Out;
  const index64 steps = bytes / static_cast<int64_t>(sizeof(In));
  for (index64 step = lane; step < steps; step += lanes) {
    const In in = source.template load<In>(from + step * static_cast<int64_t>(sizeof(In)));
    target.template store<Out>(to + step * static_cast<int64_t>(sizeof(Out)), Codec::convert(in, scale));
  }
}

}  // namespace pf
