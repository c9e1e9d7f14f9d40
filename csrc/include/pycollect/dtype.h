// The numeric types a leaf can have, by the names that numpy and torch share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

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

// The type of that name ("float32", "bool", ...); throws std::invalid_argument for another one.
DType dtype_named(std::string_view name);

}  // namespace pycollect::inline PYCOLLECT_ABI
