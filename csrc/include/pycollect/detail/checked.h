// Overflow checks for 64-bit sizes and offsets. Every product or sum that becomes one uses these
// functions.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>

#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Multiplies two non-negative sizes. Throws std::length_error if the result does not fit.
inline std::int64_t checked_mul(std::int64_t a, std::int64_t b) {
  if (a != 0 && b > std::numeric_limits<std::int64_t>::max() / a) {
    throw std::length_error("a size does not fit in 64 bits");
  }
  return a * b;
}

// Adds two non-negative sizes. Throws std::length_error if the result does not fit.
inline std::int64_t checked_add(std::int64_t a, std::int64_t b) {
  if (b > std::numeric_limits<std::int64_t>::max() - a) {
    throw std::length_error("a size does not fit in 64 bits");
  }
  return a + b;
}

// Rounds n up to a multiple of 64, the alignment of every leaf and header.
inline std::int64_t align64(std::int64_t n) { return checked_add(n, 63) & ~std::int64_t{63}; }

}  // namespace pycollect::inline PYCOLLECT_ABI
