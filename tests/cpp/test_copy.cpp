#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "pycollect/copy.h"
#include "pycollect/thread_pool.h"
#include "refused.h"

using namespace pycollect;

namespace {

template <typename T>
TensorView view_of(std::vector<T>& values, DType dtype, const Dims& shape) {
  return TensorView::contiguous(values.data(), dtype, shape);
}

// Casts one value with copy().
template <typename To, typename From>
To cast(From value, DType from, DType to) {
  To result;
  copy(TensorView::contiguous(&result, to, {}), TensorView::contiguous(&value, from, {}));
  return result;
}

// The value of a 16-bit float, computed from its definition.
double half_value(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 31) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  return sign *
         (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

TensorView transposed(const TensorView& view) {
  TensorView result = view;
  for (int i = 0; i < view.rank(); ++i) {
    result.shape[i] = view.shape[view.rank() - 1 - i];
    result.strides[i] = view.strides[view.rank() - 1 - i];
  }
  return result;
}

// Copies element by element, as a reference.
template <typename T>
void check_equal(const TensorView& a, const TensorView& b) {
  REQUIRE(a.shape == b.shape);
  if (a.rank() == 0) {
    T x, y;
    std::memcpy(&x, a.data, sizeof(T));
    std::memcpy(&y, b.data, sizeof(T));
    REQUIRE(x == y);
    return;
  }
  for (std::int64_t i = 0; i < a.shape[0]; ++i) {
    check_equal<T>(a[i], b[i]);
  }
}

}  // namespace

TEST_CASE("all 65536 half floats widen to their value and convert back") {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float wide = cast<float>(half, DType::float16, DType::float32);
    REQUIRE(same(wide, half_value(half)));
    REQUIRE(same(cast<double>(half, DType::float16, DType::float64), half_value(half)));
    const auto back = cast<std::uint16_t>(wide, DType::float32, DType::float16);
    if (std::isnan(wide)) {
      REQUIRE(std::isnan(half_value(back)));
    } else {
      REQUIRE(back == half);
      REQUIRE(cast<std::uint16_t>(half_value(half), DType::float64, DType::float16) == half);
    }
  }
}

TEST_CASE("a value between two half floats rounds to nearest, ties to even") {
  for (int bits = 0; bits < 0x7bff; ++bits) {
    const auto low = static_cast<std::uint16_t>(bits);
    const auto high = static_cast<std::uint16_t>(bits + 1);
    const double middle = (half_value(low) + half_value(high)) / 2;
    const std::uint16_t even = bits % 2 == 0 ? low : high;
    for (int sign : {1, -1}) {
      const auto mark = static_cast<std::uint16_t>(sign < 0 ? 0x8000 : 0);
      const auto to_half = [&](double value) {
        return static_cast<std::uint16_t>(
            cast<std::uint16_t>(sign * value, DType::float64, DType::float16) ^ mark);
      };
      REQUIRE(to_half(middle) == even);
      // So close to the middle that an intermediate float would lose the difference.
      REQUIRE(to_half(std::nextafter(middle, 1e9)) == high);
      REQUIRE(to_half(std::nextafter(middle, -1e9)) == low);
      REQUIRE(cast<std::uint16_t>(static_cast<float>(sign * middle), DType::float32,
                                  DType::float16) == (even ^ mark));
    }
  }
  CHECK(cast<std::uint16_t>(65519.0, DType::float64, DType::float16) == 0x7bff);
  CHECK(cast<std::uint16_t>(65520.0, DType::float64, DType::float16) == 0x7c00);
  CHECK(cast<std::uint16_t>(-1e300, DType::float64, DType::float16) == 0xfc00);
  CHECK(cast<std::uint16_t>(1e-300, DType::float64, DType::float16) == 0);
}

TEST_CASE("bfloat16 rounds once, to nearest, ties to even") {
  const auto to_bfloat = [](double v) {
    return cast<std::uint16_t>(v, DType::float64, DType::bfloat16);
  };
  CHECK(to_bfloat(1.0) == 0x3f80);
  CHECK(to_bfloat(1.0 + 1.0 / 256) == 0x3f80);  // a tie
  CHECK(to_bfloat(1.0 + 3.0 / 256) == 0x3f82);  // a tie
  CHECK(to_bfloat(1.0 + 1.0 / 256 + 1e-12) == 0x3f81);
  CHECK(to_bfloat(1e300) == 0x7f80);
  CHECK(cast<float>(std::uint16_t{0x3f81}, DType::bfloat16, DType::float32) == 1.0f + 1.0f / 128);
  // A NaN remains a NaN even if its upper bits are zero.
  CHECK(std::isnan(cast<float>(
      cast<std::uint16_t>(std::bit_cast<float>(0x7f800001u), DType::float32, DType::bfloat16),
      DType::bfloat16, DType::float32)));
  // An integer that a double cannot hold, just above a tie.
  const std::int64_t above = (std::int64_t{1} << 62) + (std::int64_t{1} << 54) + 1;
  CHECK(cast<std::uint16_t>(above, DType::int64, DType::bfloat16) == 0x5e81);
  CHECK(cast<std::uint16_t>(above - 1, DType::int64, DType::bfloat16) == 0x5e80);
  CHECK(cast<std::uint16_t>(-above, DType::int64, DType::bfloat16) == 0xde81);
  CHECK(cast<std::uint16_t>(~std::uint64_t{0}, DType::uint64, DType::bfloat16) == 0x5f80);
  CHECK(cast<std::uint16_t>(std::int16_t{-3}, DType::int16, DType::float16) == 0xc200);
}

TEST_CASE("floats are truncated to integers, saturated, and NaN becomes 0") {
  constexpr double inf = std::numeric_limits<double>::infinity();
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const auto to_int8 = [](double v) { return cast<std::int8_t>(v, DType::float64, DType::int8); };
  CHECK(to_int8(-1.9) == -1);
  CHECK(to_int8(127.9) == 127);
  CHECK(to_int8(128) == 127);
  CHECK(to_int8(-128.9) == -128);
  CHECK(to_int8(-1e9) == -128);
  CHECK(to_int8(nan) == 0);
  CHECK(cast<std::uint8_t>(-0.5, DType::float64, DType::uint8) == 0);
  CHECK(cast<std::uint8_t>(-5.0, DType::float64, DType::uint8) == 0);
  CHECK(cast<std::uint8_t>(255.5, DType::float64, DType::uint8) == 255);
  CHECK(cast<std::uint8_t>(256.0, DType::float64, DType::uint8) == 255);
  CHECK(cast<std::int64_t>(inf, DType::float64, DType::int64) ==
        std::numeric_limits<std::int64_t>::max());
  CHECK(cast<std::int64_t>(-inf, DType::float64, DType::int64) ==
        std::numeric_limits<std::int64_t>::min());
  CHECK(cast<std::int64_t>(9223372036854774784.0, DType::float64, DType::int64) ==
        9223372036854774784);
  CHECK(cast<std::uint64_t>(1.8446744073709552e19f, DType::float32, DType::uint64) ==
        std::numeric_limits<std::uint64_t>::max());
  CHECK(cast<std::uint64_t>(-1.0f, DType::float32, DType::uint64) == 0);
  CHECK(cast<std::int32_t>(std::uint16_t{0x7c00}, DType::float16, DType::int32) ==
        std::numeric_limits<std::int32_t>::max());
}

TEST_CASE("bool, integers, complex") {
  CHECK(cast<std::uint8_t>(0.5f, DType::float32, DType::boolean) == 1);
  CHECK(cast<std::uint8_t>(std::numeric_limits<float>::quiet_NaN(), DType::float32,
                           DType::boolean) == 1);
  CHECK(cast<std::uint8_t>(-0.0f, DType::float32, DType::boolean) == 0);
  CHECK(cast<std::uint8_t>(std::int64_t{256}, DType::int64, DType::boolean) == 1);
  CHECK(cast<std::int32_t>(std::uint8_t{2}, DType::boolean, DType::int32) == 1);
  CHECK(cast<std::uint8_t>(std::int32_t{-1}, DType::int32, DType::uint8) == 255);
  CHECK(cast<std::int8_t>(std::int64_t{300}, DType::int64, DType::int8) == 44);
  CHECK(cast<std::complex<double>>(2.5f, DType::float32, DType::complex128) == 2.5);
  CHECK(cast<float>(std::complex<double>(2.5, 1), DType::complex128, DType::float32) == 2.5f);
  CHECK(cast<std::uint8_t>(std::complex<float>(0, 1), DType::complex64, DType::boolean) == 1);
  CHECK(cast<std::complex<float>>(std::complex<double>(1, -2), DType::complex128,
                                  DType::complex64) == std::complex<float>(1, -2));
}

TEST_CASE("every pair of types copies small integers") {
  for (int from = 0; from <= static_cast<int>(DType::complex128); ++from) {
    for (int to = 0; to <= static_cast<int>(DType::complex128); ++to) {
      std::vector<double> values{0, 1, 0, 1, 1};
      std::vector<std::byte> a(5 * 16), b(5 * 16);
      std::vector<double> back(5);
      const auto from_view = TensorView::contiguous(a.data(), static_cast<DType>(from), {5});
      const auto to_view = TensorView::contiguous(b.data(), static_cast<DType>(to), {5});
      copy(from_view, view_of(values, DType::float64, {5}));
      copy(to_view, from_view);
      copy(view_of(back, DType::float64, {5}), to_view);
      CHECK(back == values);
    }
  }
}

TEST_CASE("strides: transposed, reversed, broadcast, with gaps, unaligned") {
  std::vector<std::int32_t> source(2 * 3 * 4);
  for (std::size_t i = 0; i < source.size(); ++i) {
    source[i] = static_cast<std::int32_t>(i);
  }
  TensorView src = view_of(source, DType::int32, {2, 3, 4});

  SUBCASE("transposed to contiguous and back") {
    std::vector<std::int32_t> target(24);
    const TensorView dst = view_of(target, DType::int32, {4, 3, 2});
    copy(dst, transposed(src));
    check_equal<std::int32_t>(dst, transposed(src));
    std::vector<std::int32_t> again(24);
    copy(transposed(view_of(again, DType::int32, {2, 3, 4})), dst);
    CHECK(again == source);
  }
  SUBCASE("two transposed arrays are one run") {
    std::vector<std::int32_t> target(24);
    copy(transposed(view_of(target, DType::int32, {2, 3, 4})), transposed(src));
    CHECK(target == source);
  }
  SUBCASE("reversed") {
    TensorView reversed = src;
    reversed.data += 4 * reversed.strides[1] - 2 * reversed.strides[1];
    reversed.strides[1] = -reversed.strides[1];
    std::vector<std::int32_t> target(24);
    const TensorView dst = view_of(target, DType::int32, {2, 3, 4});
    copy(dst, reversed);
    check_equal<std::int32_t>(dst, reversed);
    CHECK(target[0] == 8);
  }
  SUBCASE("broadcast") {
    src.shape[0] = 5;
    src.strides[0] = 0;
    std::vector<std::int32_t> target(60);
    const TensorView dst = view_of(target, DType::int32, {5, 3, 4});
    copy(dst, src);
    check_equal<std::int32_t>(dst, src);
  }
  SUBCASE("gaps and cast") {
    std::vector<double> target(2 * 3 * 8, -1);
    TensorView dst = view_of(target, DType::float64, {2, 3, 8});
    dst.shape[2] = 4;
    dst.strides[2] *= 2;
    copy(dst, src);
    CHECK(target[2] == 1);
    CHECK(target[1] == -1);
    CHECK(target.back() == -1);
    CHECK(target[target.size() - 2] == 23);
  }
  SUBCASE("unaligned") {
    std::vector<std::byte> bytes(24 * 8 + 1);
    TensorView dst = TensorView::contiguous(bytes.data() + 1, DType::int64, {2, 3, 4});
    copy(dst, src);
    std::vector<std::int32_t> back(24);
    copy(view_of(back, DType::int32, {2, 3, 4}), dst);
    CHECK(back == source);
  }
}

TEST_CASE("empty arrays, scalars, many dimensions") {
  copy(TensorView::contiguous(nullptr, DType::int8, {3, 0}),
       TensorView::contiguous(nullptr, DType::float32, {3, 0}));
  zero(TensorView::contiguous(nullptr, DType::int8, {0}));
  Dims shape;
  for (int i = 0; i < Dims::kMaxRank; ++i) {
    shape.push_back(i % 5 == 0 ? 2 : 1);
  }
  std::vector<float> a{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  std::vector<float> b(16);
  copy(view_of(b, DType::float32, shape), view_of(a, DType::float32, shape));
  CHECK(a == b);
}

TEST_CASE("invalid arguments are refused") {
  std::vector<float> a(6), b(6);
  CHECK_REFUSED(copy(view_of(a, DType::float32, {2, 3}), view_of(b, DType::float32, {3, 2})),
                "copy", std::invalid_argument);
  TensorView device = view_of(b, DType::float32, {2, 3});
  device.device = {DeviceKind::cuda, 0};
  CHECK_THROWS_AS(copy(view_of(a, DType::float32, {2, 3}), device), std::invalid_argument);
}

TEST_CASE("zero clears its view and nothing else") {
  std::vector<float> values(24, 1);
  TensorView view = view_of(values, DType::float32, {4, 6});
  view.shape[1] = 3;
  zero(view);
  for (std::size_t i = 0; i < values.size(); ++i) {
    CHECK(values[i] == (i % 6 < 3 ? 0.0f : 1.0f));
  }
  zero(view_of(values, DType::float32, {24}));
  CHECK(values == std::vector<float>(24));
}

TEST_CASE("a parallel copy gives the same result") {
  ThreadPool pool(3);
  std::mt19937 random(1);
  std::vector<float> source(3 * 700 * 500);
  for (float& value : source) {
    value = static_cast<float>(random()) / 1000.0f;
  }
  for (const Dims& shape : {Dims{1050000}, Dims{3, 350000}, Dims{350000, 3}, Dims{3, 700, 500},
                            Dims{1, 1, 1050000, 1}}) {
    for (DType dtype : {DType::float32, DType::float64, DType::uint8}) {
      const TensorView src = view_of(source, DType::float32, shape);
      std::vector<std::uint8_t> serial(source.size() * 8), parallel(source.size() * 8);
      copy(TensorView::contiguous(serial.data(), dtype, shape), src);
      parallel_copy(pool, TensorView::contiguous(parallel.data(), dtype, shape), src);
      CHECK(serial == parallel);
      copy(TensorView::contiguous(serial.data(), dtype, transposed(src).shape), transposed(src));
      parallel_copy(pool, TensorView::contiguous(parallel.data(), dtype, transposed(src).shape),
                    transposed(src));
      CHECK(serial == parallel);
    }
  }
}

TEST_CASE("runs of frames") {
  std::vector<std::int16_t> source(10 * 4), target(20 * 3);
  for (std::size_t i = 0; i < source.size(); ++i) {
    source[i] = static_cast<std::int16_t>(i);
  }
  TensorView src = view_of(source, DType::int16, {10, 4});
  src.shape[1] = 3;
  const TensorView dst = view_of(target, DType::int16, {20, 3});
  const RunCopy run(dst, src);
  run(dst.data + 5 * dst.strides[0], src.data + 2 * src.strides[0], 4);
  TensorView part = dst;
  part.data += 5 * dst.strides[0];
  part.shape[0] = 4;
  TensorView from = src;
  from.data += 2 * src.strides[0];
  from.shape[0] = 4;
  check_equal<std::int16_t>(part, from);
  CHECK(target[14] == 0);
  CHECK(target[5 * 3 + 12] == 0);
  run(nullptr, nullptr, 0);
  CHECK_THROWS_AS(RunCopy(dst, view_of(source, DType::int16, {10, 4})), std::invalid_argument);
}

TEST_CASE("a source may be constant") {
  const std::array<std::int16_t, 6> source{1, 2, 3, 4, 5, 6};
  std::array<float, 6> target{};
  const ConstTensorView from = view(std::span(source), {2, 3});
  copy(view(std::span(target), {2, 3}), from);
  CHECK(target == std::array<float, 6>{1, 2, 3, 4, 5, 6});
  copy(view(std::span(target).first<3>(), {3}), from[1]);
  CHECK(target == std::array<float, 6>{4, 5, 6, 4, 5, 6});
}

TEST_CASE("a streamed copy gives the same result at any alignment") {
  ThreadPool pool(3);
  std::vector<std::uint8_t> source(3 << 20), plain(source.size()), streamed(source.size());
  for (std::size_t i = 0; i < source.size(); ++i) {
    source[i] = static_cast<std::uint8_t>(i * 7 + i / 256);
  }
  const auto part = [](std::vector<std::uint8_t>& bytes, std::int64_t begin, const Dims& shape) {
    TensorView view = TensorView::contiguous(bytes.data() + begin, DType::uint8, shape);
    view.strides[0] += 3;  // gaps between rows
    return view;
  };
  for (const std::int64_t begin : {0, 1, 63}) {
    for (const Dims& shape :
         {Dims{2, 100}, Dims{3, 4095}, Dims{3, 4096}, Dims{5, 70001}, Dims{2, 1 << 20}}) {
      std::fill(plain.begin(), plain.end(), std::uint8_t{0xEE});
      streamed = plain;
      const TensorView from = part(source, 5, shape);
      copy(part(plain, begin, shape), from);
      copy(part(streamed, begin, shape), from, Stores::streamed);
      CHECK((plain == streamed));
      std::fill(streamed.begin(), streamed.end(), std::uint8_t{0xEE});
      parallel_copy(pool, part(streamed, begin, shape), from, Stores::streamed);
      CHECK((plain == streamed));
    }
  }
  std::vector<float> wide(4096);
  copy(view_of(wide, DType::float32, {4096}),
       TensorView::contiguous(source.data(), DType::uint8, {4096}), Stores::streamed);
  CHECK(wide[300] == static_cast<float>(source[300]));
  CHECK(stores_for(1 << 10) == Stores::cached);
  CHECK(stores_for(std::int64_t{1} << 30) == Stores::streamed);
}
