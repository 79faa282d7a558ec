// What becomes of an entry's elements on their way to a row, one load and one store at a time.
#pragma once

#include "common/fp8.h"
#include "common/vectors.h"
#include "common/views.h"

namespace pf {

/// Stands for a type where a value is passed.
template <class Type>
struct Chosen {
  using type = Type;
};

struct AsF32 {
  using Word = float;
  static __device__ __forceinline__ Word of(float value) { return value; }
};
struct AsF16 {
  using Word = uint16_t;
  static __device__ __forceinline__ Word of(float value) { return fp16_of(value); }
};
struct AsBf16 {
  using Word = uint16_t;
  static __device__ __forceinline__ Word of(float value) { return bf16_of(value); }
};

/// Copies kBytes bytes. Like every move it is made once a thread from the view of the scale, and then moves
/// from `g.src` to `g.dst`.
template <int kBytes>
struct Copy {
  static constexpr int kSrcBytes = kBytes;
  static constexpr int kDstBytes = kBytes;

  template <class Scale>
  __device__ __forceinline__ explicit Copy(const Scale&) {}

  template <class Gather>
  __device__ __forceinline__ void move(const Gather& g, index64 to, index64 from) const {
    using Vector = typename VectorOf<kBytes>::type;
    g.dst.template store<Vector>(to, g.src.template load<Vector>(from));
  }
};

/// Dequantises kElements codes: one fp32 product, then one rounding.
template <class Format, class Result, int kElements>
struct Dequantise {
  using Word = typename Result::Word;
  static constexpr int kSrcBytes = kElements;
  static constexpr int kDstBytes = kElements * static_cast<int>(sizeof(Word));

  float scale;

  template <class Scale>
  __device__ __forceinline__ explicit Dequantise(const Scale& view) : scale(view.load(0)) {}

  template <class Gather>
  __device__ __forceinline__ void move(const Gather& g, index64 to, index64 from) const {
    using Codes = typename VectorOf<kSrcBytes>::type;
    using Words = typename VectorOf<kDstBytes>::type;
    const Codes loaded = g.src.template load<Codes>(from);
    uint8_t codes[kElements];
    memcpy(codes, &loaded, sizeof loaded);
    Word words[kElements];
    for (int i = 0; i < kElements; ++i) words[i] = Result::of(Format::decode(codes[i]) * scale);
    Words stored;
    memcpy(&stored, words, sizeof stored);
    g.dst.template store<Words>(to, stored);
  }
};

}  // namespace pf
