#include "pycollect/dtype.h"

#include <array>
#include <stdexcept>
#include <string>

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

struct Traits {
  std::string_view name;
  std::size_t size;
  DTypeKind kind;
};

// In the order of DType.
constexpr std::array<Traits, 15> kTraits{{
    {"bool", 1, DTypeKind::boolean},
    {"uint8", 1, DTypeKind::integer},
    {"int8", 1, DTypeKind::integer},
    {"int16", 2, DTypeKind::integer},
    {"int32", 4, DTypeKind::integer},
    {"int64", 8, DTypeKind::integer},
    {"uint16", 2, DTypeKind::integer},
    {"uint32", 4, DTypeKind::integer},
    {"uint64", 8, DTypeKind::integer},
    {"float16", 2, DTypeKind::floating},
    {"bfloat16", 2, DTypeKind::floating},
    {"float32", 4, DTypeKind::floating},
    {"float64", 8, DTypeKind::floating},
    {"complex64", 8, DTypeKind::complex},
    {"complex128", 16, DTypeKind::complex},
}};

const Traits& traits(DType dtype) { return kTraits.at(static_cast<std::size_t>(dtype)); }

}  // namespace

std::size_t item_size(DType dtype) { return traits(dtype).size; }
DTypeKind kind_of(DType dtype) { return traits(dtype).kind; }
std::string_view name_of(DType dtype) { return traits(dtype).name; }

DType dtype_named(std::string_view name) {
  for (std::size_t i = 0; i < kTraits.size(); ++i) {
    if (kTraits[i].name == name) {
      return static_cast<DType>(i);
    }
  }
  throw std::invalid_argument("dtype: expected a numeric type such as float32, got " +
                              std::string(name));
}

}  // namespace pycollect::inline PYCOLLECT_ABI
