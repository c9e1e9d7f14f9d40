// Sizes and offsets are 64-bit, and every product or sum that becomes one passes through here.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// a * b of two non-negative sizes; throws std::length_error where that is no 64-bit size.
inline std::int64_t checked_mul(std::int64_t a, std::int64_t b) {
  if (a != 0 && b > std::numeric_limits<std::int64_t>::max() / a) {
    throw std::length_error("a size does not fit in 64 bits");
  }
  return a * b;
}

// a + b of two non-negative sizes; throws std::length_error where that is no 64-bit size.
inline std::int64_t checked_add(std::int64_t a, std::int64_t b) {
  if (b > std::numeric_limits<std::int64_t>::max() - a) {
    throw std::length_error("a size does not fit in 64 bits");
  }
  return a + b;
}

// n rounded up to a multiple of 64, the alignment of every leaf and header.
inline std::int64_t align64(std::int64_t n) { return checked_add(n, 63) & ~std::int64_t{63}; }

}  // namespace pycollect::inline PYCOLLECT_ABI
