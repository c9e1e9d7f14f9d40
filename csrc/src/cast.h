// Conversion of values between numeric types, by the rules in copy.h. Private to the library.
#pragma once

#include <bit>
#include <cmath>
#include <complex>
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI::cast {

// Memory representation of types that the language lacks.
struct Bool {
  std::uint8_t byte;
};
struct Half {
  std::uint16_t bits;
};
struct BFloat {
  std::uint16_t bits;
};

template <typename T>
inline constexpr bool is_complex = false;
template <typename T>
inline constexpr bool is_complex<std::complex<T>> = true;

inline float to_float(Half half) {
  // An addition raises the exponent. Infinities and NaN need a second one; subnormal numbers are
  // normalized by a subtraction, which the hardware rounds.
  const std::uint32_t magnitude = static_cast<std::uint32_t>(half.bits & 0x7fffu) << 13;
  const std::uint32_t exponent = magnitude & 0x0f800000u;
  std::uint32_t bits = magnitude + (112u << 23);
  float value = 0;
  if (exponent == 0x0f800000u) {
    value = std::bit_cast<float>(bits + (112u << 23));
  } else if (exponent == 0) {
    value = std::bit_cast<float>(bits + (1u << 23)) - std::bit_cast<float>(113u << 23);
  } else {
    value = std::bit_cast<float>(bits);
  }
  const std::uint32_t sign = static_cast<std::uint32_t>(half.bits & 0x8000u) << 16;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
}

inline float to_float(BFloat value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

inline Half to_half(float value) {
  const std::uint32_t all = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (all >> 16) & 0x8000u;
  const std::uint32_t bits = all & 0x7fffffffu;
  std::uint32_t half = 0;
  if (bits >= 0x47800000u) {  // 65536 and more, infinity, NaN
    half = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (bits < 0x38800000u) {
    // Subnormal: 0.5f and the result have the same last place, so the addition rounds.
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(bits) + 0.5f) - 0x3f000000u;
  } else {
    half = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  }
  return {static_cast<std::uint16_t>(sign | half)};
}

inline BFloat to_bfloat(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};  // remains a NaN
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Rounds to a float such that a second rounding, to 16 bits, gives the result of a single rounding
// of the double: if the double lies between two floats, the one whose last bit is set.
inline float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  if (back == value || value != value) {
    return nearest;
  }
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
  const bool too_far = std::fabs(back) > std::fabs(value);
  return std::bit_cast<float>((too_far ? bits - 1 : bits) | 1u);
}

// For integers that a double cannot hold, any lost bit sets the last bit that remains.
template <std::integral T>
float round_to_odd(T value) {
  if constexpr (sizeof(T) < 8) {
    return round_to_odd(static_cast<double>(value));
  } else {
    const bool negative = std::cmp_less(value, 0);
    std::uint64_t size = static_cast<std::uint64_t>(value);
    size = negative ? 0 - size : size;
    if ((size >> 53) != 0 && (size & 0x7ffu) != 0) {
      size = (size & ~std::uint64_t{0x7ff}) | 0x800u;
    }
    const double exact = static_cast<double>(size);
    return round_to_odd(negative ? -exact : exact);
  }
}

template <std::integral D, std::floating_point S>
D saturate(S value) {
  // Both bounds are powers of two (or zero), so S holds them exactly.
  constexpr S low = static_cast<S>(std::numeric_limits<D>::min());
  constexpr D half = std::numeric_limits<D>::max() / 2 + 1;
  constexpr S high = static_cast<S>(half) * 2;
  if (value >= high) {
    return std::numeric_limits<D>::max();
  }
  if (value > low) {
    return static_cast<D>(value);
  }
  return value <= low ? std::numeric_limits<D>::min() : D{0};  // else: NaN
}

// Converts a value of an arithmetic type.
template <typename D, typename S>
D narrow(S value) {
  if constexpr (std::is_same_v<D, Bool>) {
    return {static_cast<std::uint8_t>(value != S{0})};
  } else if constexpr (is_complex<D>) {
    return {narrow<typename D::value_type>(value), 0};
  } else if constexpr (std::is_same_v<D, Half> || std::is_same_v<D, BFloat>) {
    float rounded = 0;
    if constexpr (std::is_same_v<S, float>) {
      rounded = value;
    } else {
      rounded = round_to_odd(value);
    }
    if constexpr (std::is_same_v<D, Half>) {
      return to_half(rounded);
    } else {
      return to_bfloat(rounded);
    }
  } else if constexpr (std::is_integral_v<D> && std::is_floating_point_v<S>) {
    return saturate<D>(value);
  } else {
    return static_cast<D>(value);
  }
}

template <typename D, typename S>
D convert(S value) {
  if constexpr (std::is_same_v<S, Bool>) {
    return narrow<D>(static_cast<std::uint8_t>(value.byte != 0));
  } else if constexpr (std::is_same_v<S, Half> || std::is_same_v<S, BFloat>) {
    return narrow<D>(to_float(value));
  } else if constexpr (is_complex<S> && is_complex<D>) {
    using Part = typename D::value_type;
    return {static_cast<Part>(value.real()), static_cast<Part>(value.imag())};
  } else if constexpr (is_complex<S> && std::is_same_v<D, Bool>) {
    return {static_cast<std::uint8_t>(value.real() != 0 || value.imag() != 0)};
  } else if constexpr (is_complex<S>) {
    return narrow<D>(value.real());
  } else {
    return narrow<D>(value);
  }
}

}  // namespace pycollect::inline PYCOLLECT_ABI::cast
