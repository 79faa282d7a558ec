// Integers for index arithmetic.
//
// In the release build they are plain integers. In the checked build they record every wrap (signed and
// unsigned) and every lossy pf::narrow with operands, line and file, and go on with the wrapped value.
//
// Conversions that keep every value are implicit; any other one is spelled pf::narrow<To>(value). The
// checked build is the stricter one: what compiles there compiles as plain integers with the same types.
#pragma once

#include <limits>
#include <type_traits>

#include "common/checking.h"

namespace pf {

#ifndef PF_CHECKED

using index32 = int32_t;
using index64 = int64_t;
using uindex32 = uint32_t;
using uindex64 = uint64_t;

template <class To, class From>
__host__ __device__ __forceinline__ To narrow(From value) {
  return static_cast<To>(value);
}

#else

namespace detail {

template <class From, class To>
inline constexpr bool keeps_every_value =
    std::is_signed_v<From> == std::is_signed_v<To> ? sizeof(From) <= sizeof(To)
                                                   : std::is_unsigned_v<From> && sizeof(From) < sizeof(To);

// `1u * index` would need a literal with a suffix for every type: int may meet an unsigned index.
template <class From, class To>
concept Builtin = std::is_integral_v<From> &&
                  (keeps_every_value<From, To> || (std::is_same_v<From, int> && std::is_unsigned_v<To>));

template <class T>
using Unsigned = std::make_unsigned_t<T>;

template <int kOperation, class T>
__device__ PF_COLD void record(T a, T b, T result, const char* file, int line) {
  check::record_index(kOperation, static_cast<int64_t>(a), static_cast<int64_t>(b), static_cast<int64_t>(result),
                      static_cast<int>(sizeof(T)) * 8, std::is_signed_v<T>, file, line);
}

template <int kOperation, class T>
__device__ __forceinline__ T counted(T a, T b, T result, bool faulty, const char* file, int line) {
  atomicAdd(&check::stripe().operations, 1ull);
  if (faulty) [[unlikely]] record<kOperation>(a, b, result, file, line);
  return result;
}

template <class T>
__device__ __forceinline__ bool product_wraps(T a, T b, T result) {
  if constexpr (sizeof(T) <= 4) {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    return static_cast<Wide>(a) * static_cast<Wide>(b) != static_cast<Wide>(result);
  } else {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<Wide>(a) * static_cast<Wide>(b) != static_cast<Wide>(result);
  }
}

}  // namespace detail

template <class T>
class Index;

// The right operand of an operator. An operator can have no default arguments; the conversion of its
// operand can, and they are filled in where the expression stands.
template <class T>
struct Located {
  T value;
  int line;
  const char* file;

  template <class From>
    requires detail::Builtin<From, T>
  __host__ __device__ __forceinline__ Located(From from, int at = __builtin_LINE(),
                                              const char* in = __builtin_FILE())
      : value(static_cast<T>(from)), line(at), file(in) {}

  template <class From>
    requires detail::keeps_every_value<From, T>
  __host__ __device__ __forceinline__ Located(Index<From> from, int at = __builtin_LINE(),
                                              const char* in = __builtin_FILE())
      : value(static_cast<T>(from.value())), line(at), file(in) {}
};

template <class T>
struct LocatedTarget {
  Index<T>& target;
  int line;
  const char* file;

  __host__ __device__ __forceinline__ LocatedTarget(Index<T>& to, int at = __builtin_LINE(),
                                                    const char* in = __builtin_FILE())
      : target(to), line(at), file(in) {}
};

template <class T>
class Index {
  using U = detail::Unsigned<T>;
  using L = Located<T>;
  static constexpr T kLeast = std::numeric_limits<T>::min();

 public:
  Index() = default;  // trivial: __shared__ variables have no constructor

  template <class From>
    requires detail::Builtin<From, T>
  __host__ __device__ __forceinline__ constexpr Index(From from) : value_(static_cast<T>(from)) {}

  template <class From>
    requires(detail::keeps_every_value<From, T> && !std::is_same_v<From, T>)
  __host__ __device__ __forceinline__ constexpr Index(Index<From> from)
      : value_(static_cast<T>(from.value())) {}

  __host__ __device__ __forceinline__ constexpr T value() const { return value_; }

  friend __device__ __forceinline__ Index operator+(Index a, L b) {
    const T sum = static_cast<T>(static_cast<U>(a.value_) + static_cast<U>(b.value));
    bool wraps;
    if constexpr (std::is_signed_v<T>) {
      wraps = (b.value < 0) != (sum < a.value_);
    } else {
      wraps = sum < a.value_;
    }
    return detail::counted<PF_ADD>(a.value_, b.value, sum, wraps, b.file, b.line);
  }

  friend __device__ __forceinline__ Index operator-(Index a, L b) {
    const T difference = static_cast<T>(static_cast<U>(a.value_) - static_cast<U>(b.value));
    bool wraps;
    if constexpr (std::is_signed_v<T>) {
      wraps = (b.value > 0) != (difference < a.value_);
    } else {
      wraps = a.value_ < b.value;
    }
    return detail::counted<PF_SUBTRACT>(a.value_, b.value, difference, wraps, b.file, b.line);
  }

  friend __device__ __forceinline__ Index operator*(Index a, L b) {
    const T product = static_cast<T>(static_cast<U>(a.value_) * static_cast<U>(b.value));
    const bool wraps = detail::product_wraps(a.value_, b.value, product);
    return detail::counted<PF_MULTIPLY>(a.value_, b.value, product, wraps, b.file, b.line);
  }

  friend __device__ __forceinline__ Index operator/(Index a, L b) {
    const bool faulty = has_no_quotient(a.value_, b.value);
    const T quotient = faulty ? (b.value == 0 ? T{0} : a.value_) : static_cast<T>(a.value_ / b.value);
    return detail::counted<PF_DIVIDE>(a.value_, b.value, quotient, faulty, b.file, b.line);
  }

  friend __device__ __forceinline__ Index operator%(Index a, L b) {
    const bool faulty = has_no_quotient(a.value_, b.value);
    const T remainder = faulty ? T{0} : static_cast<T>(a.value_ % b.value);
    return detail::counted<PF_DIVIDE>(a.value_, b.value, remainder, faulty, b.file, b.line);
  }

  // A shift loses bits if shifting back does not restore the value; a count outside [0, bits) has no
  // meaning on either target and gives 0 here.
  friend __device__ __forceinline__ Index operator<<(Index a, L b) {
    constexpr int kBits = static_cast<int>(sizeof(T)) * 8;
    const bool meaningless = static_cast<U>(b.value) >= static_cast<U>(kBits);
    const T shifted = meaningless ? T{0} : static_cast<T>(static_cast<U>(a.value_) << b.value);
    const bool faulty = meaningless || static_cast<T>(shifted >> b.value) != a.value_;
    return detail::counted<PF_SHIFT_LEFT>(a.value_, b.value, shifted, faulty, b.file, b.line);
  }

  friend __device__ __forceinline__ Index operator-(L a) {
    const T negated = static_cast<T>(U{0} - static_cast<U>(a.value));
    const bool wraps = std::is_signed_v<T> ? a.value == kLeast : a.value != 0;
    return detail::counted<PF_NEGATE>(a.value, T{0}, negated, wraps, a.file, a.line);
  }

  friend __device__ __forceinline__ Index& operator++(LocatedTarget<T> a) {
    return a.target = a.target + L(1, a.line, a.file);
  }
  __device__ __forceinline__ Index& operator+=(L b) { return *this = *this + b; }
  __device__ __forceinline__ Index& operator-=(L b) { return *this = *this - b; }
  __device__ __forceinline__ Index& operator*=(L b) { return *this = *this * b; }
  __device__ __forceinline__ Index& operator/=(L b) { return *this = *this / b; }

  friend __host__ __device__ __forceinline__ bool operator==(Index a, Index b) {
    return a.value_ == b.value_;
  }
  friend __host__ __device__ __forceinline__ bool operator!=(Index a, Index b) {
    return a.value_ != b.value_;
  }
  friend __host__ __device__ __forceinline__ bool operator<(Index a, Index b) {
    return a.value_ < b.value_;
  }
  friend __host__ __device__ __forceinline__ bool operator<=(Index a, Index b) {
    return a.value_ <= b.value_;
  }
  friend __host__ __device__ __forceinline__ bool operator>(Index a, Index b) {
    return a.value_ > b.value_;
  }
  friend __host__ __device__ __forceinline__ bool operator>=(Index a, Index b) {
    return a.value_ >= b.value_;
  }

 private:
  static __device__ __forceinline__ bool has_no_quotient(T a, T b) {
    if (b == 0) return true;
    if constexpr (std::is_signed_v<T>) return b == -1 && a == kLeast;
    return false;
  }

  T value_;
};

using index32 = Index<int32_t>;
using index64 = Index<int64_t>;
using uindex32 = Index<uint32_t>;
using uindex64 = Index<uint64_t>;

namespace detail {

template <class T>
struct Plain {
  using type = T;
};
template <class T>
struct Plain<Index<T>> {
  using type = T;
};

template <class T>
__device__ __forceinline__ T plain(T value) {
  return value;
}
template <class T>
__device__ __forceinline__ T plain(Index<T> value) {
  return value.value();
}

}  // namespace detail

template <class To, class From>
__device__ __forceinline__ To narrow(From value, int line = __builtin_LINE(),
                                     const char* file = __builtin_FILE()) {
  using T = typename detail::Plain<To>::type;
  const auto from = detail::plain(value);
  const T narrowed = static_cast<T>(from);
  const bool loses = static_cast<decltype(from)>(narrowed) != from || (narrowed < 0) != (from < 0);
  atomicAdd(&check::stripe().operations, 1ull);
  if (loses) [[unlikely]] {
    check::record_index(PF_NARROW, static_cast<int64_t>(from), 0, static_cast<int64_t>(narrowed),
                        static_cast<int>(sizeof(T)) * 8, std::is_signed_v<T>, file, line);
  }
  return narrowed;
}

#endif  // PF_CHECKED

template <class T>
__host__ __device__ __forceinline__ T least(T a, std::type_identity_t<T> b) {
  return b < a ? b : a;
}

template <class T>
__host__ __device__ __forceinline__ T greatest(T a, std::type_identity_t<T> b) {
  return a < b ? b : a;
}

}  // namespace pf
