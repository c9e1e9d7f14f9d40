#include <doctest/doctest.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "pycollect/detail/checked.h"
#include "pycollect/tensor_view.h"
#include "refused.h"

using namespace pycollect;

TEST_CASE("Dims holds up to 16 extents") {
  Dims dims{2, 3};
  dims.push_back(4);
  CHECK(dims == Dims{2, 3, 4});
  CHECK(dims != Dims{2, 3});
  CHECK(Dims(dims.from(1)) == Dims{3, 4});
  CHECK(to_string(dims) == "[2, 3, 4]");
  CHECK(to_string(Dims{}) == "[]");
  for (int i = 3; i < Dims::kMaxRank; ++i) {
    dims.push_back(1);
  }
  CHECK_THROWS_AS(dims.push_back(1), std::invalid_argument);
}

TEST_CASE("element counts are checked") {
  CHECK(element_count(Dims{}.from(0)) == 1);
  CHECK(element_count(Dims{3, 0, 5}.from(0)) == 0);
  CHECK_THROWS_AS(element_count(Dims{3, -1}.from(0)), std::invalid_argument);
  CHECK_THROWS_AS(element_count(Dims{1LL << 40, 1LL << 40}.from(0)), std::length_error);
  CHECK(element_count(Dims{1LL << 40, 1LL << 40, 0}.from(0)) == 0);
}

TEST_CASE("checked arithmetic") {
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  CHECK(checked_mul(0, most) == 0);
  CHECK(checked_mul(most, 1) == most);
  CHECK_THROWS_AS(checked_mul(most, 2), std::length_error);
  CHECK(checked_add(most, 0) == most);
  CHECK_THROWS_AS(checked_add(most, 1), std::length_error);
  CHECK(align64(0) == 0);
  CHECK(align64(1) == 64);
  CHECK(align64(64) == 64);
  CHECK_THROWS_AS(align64(most), std::length_error);
}

TEST_CASE("contiguous and other views") {
  std::vector<float> values(24);
  TensorView view = TensorView::contiguous(values.data(), DType::float32, {2, 3, 4});
  CHECK(view.strides == Dims{48, 16, 4});
  CHECK(view.count() == 24);
  CHECK(view.bytes() == 96);
  CHECK(view.is_contiguous());
  view.strides[0] = 96;
  CHECK_FALSE(view.is_contiguous());
  view.shape[0] = 1;  // the stride of one element is ignored
  CHECK(view.is_contiguous());
  view.shape[0] = 0;
  CHECK(view.is_contiguous());
  CHECK(TensorView::contiguous(values.data(), DType::float32, {}).is_contiguous());
}

TEST_CASE("an element of the first dimension") {
  std::vector<std::int16_t> values(6);
  const TensorView view = TensorView::contiguous(values.data(), DType::int16, {2, 3});
  const TensorView second = view[1];
  CHECK(second.data == reinterpret_cast<std::byte*>(&values[3]));
  CHECK(second.shape == Dims{3});
  CHECK_REFUSED(view[2], "index", std::out_of_range);
  CHECK_THROWS_AS(view[-1], std::out_of_range);
  CHECK_THROWS_AS(second[0][0], std::out_of_range);
}

TEST_CASE("C++ numbers as an array of a shape, and back") {
  std::array<std::int32_t, 6> numbers{1, 2, 3, 4, 5, 6};
  const TensorView whole = view(std::span(numbers), {2, 3});
  CHECK(whole.dtype == DType::int32);
  CHECK(whole.is_contiguous());
  CHECK(whole[1].as<std::int32_t>()[0] == 4);
  CHECK_THROWS_AS(whole.as<float>(), std::invalid_argument);
  CHECK_THROWS_AS(view(std::span(numbers), {2, 2}), std::invalid_argument);

  const std::array<double, 2> constant{7, 8};
  const ConstTensorView read = view(std::span(constant), {2});
  CHECK(read.as<double>()[1] == 8);
  CHECK(read.bytes() == 16);
  CHECK(read.is_contiguous());
  CHECK(read[1].as<double>()[0] == 8);
  CHECK_THROWS_AS(read[2], std::out_of_range);
  CHECK(ConstTensorView(whole).shape == whole.shape);
}
