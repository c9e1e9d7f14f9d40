#include <doctest/doctest.h>

#include <stdexcept>

#include "pycollect/dtype.h"
#include "refused.h"

using namespace pycollect;

TEST_CASE("names and types map to each other") {
  for (int i = 0; i <= static_cast<int>(DType::complex128); ++i) {
    const auto dtype = static_cast<DType>(i);
    CHECK(dtype_named(name_of(dtype)) == dtype);
  }
  CHECK(name_of(DType::boolean) == "bool");
  CHECK_REFUSED(dtype_named("str"), "dtype", std::invalid_argument);
}

TEST_CASE("sizes and kinds") {
  CHECK(item_size(DType::boolean) == 1);
  CHECK(item_size(DType::bfloat16) == 2);
  CHECK(item_size(DType::complex64) == 8);
  CHECK(item_size(DType::complex128) == 16);
  CHECK(kind_of(DType::boolean) == DTypeKind::boolean);
  CHECK(kind_of(DType::uint64) == DTypeKind::integer);
  CHECK(kind_of(DType::float16) == DTypeKind::floating);
  CHECK(kind_of(DType::complex64) == DTypeKind::complex);
}

TEST_CASE("dtypes of C++ number types") {
  CHECK(dtype_of<bool> == DType::boolean);
  CHECK(dtype_of<float> == DType::float32);
  CHECK(dtype_of<const double> == DType::float64);
  CHECK(dtype_of<std::int8_t> == DType::int8);
  CHECK(dtype_of<std::uint16_t> == DType::uint16);
  CHECK(dtype_of<int> == DType::int32);
  CHECK(dtype_of<long> == DType::int64);
  CHECK(dtype_of<long long> == DType::int64);
  CHECK(dtype_of<std::complex<float>> == DType::complex64);
}
