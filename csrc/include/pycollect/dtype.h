// The numeric types of leaves, named as in NumPy and torch.
#pragma once

#include <complex>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

enum class DType : std::uint8_t {
  boolean,
  uint8,
  int8,
  int16,
  int32,
  int64,
  uint16,
  uint32,
  uint64,
  float16,
  bfloat16,
  float32,
  float64,
  complex64,
  complex128,
};

enum class DTypeKind : std::uint8_t { boolean, integer, floating, complex };

std::size_t item_size(DType dtype);
DTypeKind kind_of(DType dtype);
std::string_view name_of(DType dtype);

// Returns the type with this name ("float32", "bool", ...). Throws std::invalid_argument for an
// unknown name.
DType dtype_named(std::string_view name);

namespace detail {

template <typename T>
consteval DType dtype_of() {
  if constexpr (std::same_as<T, bool>) {
    return DType::boolean;
  } else if constexpr (std::integral<T>) {
    constexpr bool sign = std::is_signed_v<T>;
    switch (sizeof(T)) {
      case 1:
        return sign ? DType::int8 : DType::uint8;
      case 2:
        return sign ? DType::int16 : DType::uint16;
      case 4:
        return sign ? DType::int32 : DType::uint32;
      default:
        return sign ? DType::int64 : DType::uint64;
    }
  } else if constexpr (std::same_as<T, float>) {
    return DType::float32;
  } else if constexpr (std::same_as<T, double>) {
    return DType::float64;
  } else if constexpr (std::same_as<T, std::complex<float>>) {
    return DType::complex64;
  } else {
    static_assert(std::same_as<T, std::complex<double>>, "no leaf has this type");
    return DType::complex128;
  }
}

}  // namespace detail

// The DType of a C++ type: dtype_of<float> is DType::float32. C++ has no types for float16 and
// bfloat16.
template <typename T>
inline constexpr DType dtype_of = detail::dtype_of<std::remove_cv_t<T>>();

}  // namespace pycollect::inline PYCOLLECT_ABI
