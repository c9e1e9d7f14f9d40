// Turns a fuzzer's bytes into sizes and arrays, and compares arrays with a reference of the casts
// in copy.h. A failed check aborts.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pycollect/dtype.h"
#include "pycollect/tensor_view.h"

#define EXPECT(condition) \
  ((condition) ? void() : ::pycollect::fuzz::fail(#condition, __FILE__, __LINE__))

namespace pycollect::fuzz {

[[noreturn]] inline void fail(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: expected %s\n", file, line, condition);
  std::abort();
}

// Whether a call throws this error. Other errors end the fuzzer.
template <typename Error, typename Call>
bool throws(const Call& call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

// The input, followed by pseudo-random bytes that depend on it, so a short input can fill a batch.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : input_(data, size) {
    for (const std::uint8_t byte : input_) {
      random_ = (random_ ^ byte) * 0x100000001b3ULL;
    }
  }

  bool is_empty() const { return at_ >= input_.size(); }
  std::uint8_t byte() {
    if (!is_empty()) {
      return input_[at_++];
    }
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return static_cast<std::uint8_t>(random_ >> 32);
  }
  // A number from 0 to n - 1, of one byte; n is at most 256.
  int below(int n) { return byte() % n; }
  bool one_in(int n) { return below(n) == n - 1; }
  void fill(std::span<std::byte> bytes) {
    for (std::byte& each : bytes) {
      each = static_cast<std::byte>(byte());
    }
  }
  std::int64_t int64() {
    std::int64_t value = 0;
    fill(std::as_writable_bytes(std::span(&value, 1)));
    return value;
  }
  // Any number; often a small one, or one at a power of two.
  std::int64_t size() {
    switch (below(4)) {
      case 0:
        return int64();
      case 1:
        return static_cast<std::int64_t>((std::uint64_t{1} << below(64)) -
                                         static_cast<std::uint64_t>(below(3)));
      default:
        return below(8) - 1;
    }
  }
  DType dtype() { return static_cast<DType>(below(static_cast<int>(DType::complex128) + 1)); }
  // A shape of at most this rank and number of elements.
  Dims shape(int most_rank, std::int64_t most_elements) {
    constexpr std::int64_t kExtents[] = {1, 2, 3, 4, 5, 7, 64, 300};
    Dims shape;
    for (int left = below(most_rank + 1); left > 0; --left) {
      const std::int64_t extent = one_in(32) ? 0 : kExtents[below(8)];
      const bool fits = extent <= most_elements;
      shape.push_back(fits ? extent : 1);
      most_elements /= fits ? std::max<std::int64_t>(extent, 1) : 1;
    }
    return shape;
  }

 private:
  std::span<const std::uint8_t> input_;
  std::size_t at_ = 0;
  std::uint64_t random_ = 0xcbf29ce484222325ULL;
};

// Calls visit(index) for each index into a shape, in row-major order.
template <typename Visit>
void for_each_index(const Dims& shape, const Visit& visit) {
  Dims index = shape;
  for (std::int64_t i = 0, n = element_count(shape.from(0)); i < n; ++i) {
    std::int64_t rest = i;
    for (int axis = shape.size() - 1; axis >= 0; --axis) {
      index[axis] = rest % shape[axis];
      rest /= shape[axis];
    }
    visit(std::as_const(index));
  }
}

template <typename View>
auto at(const View& view, std::span<const std::int64_t> index) {
  auto* address = view.data;
  for (std::size_t i = 0; i < index.size(); ++i) {
    address += index[i] * view.strides[static_cast<int>(i)];
  }
  return address;
}
template <typename View>
auto at(const View& view, const Dims& index) {
  return at(view, index.from(0));
}

inline Dims joined(const Dims& first, std::span<const std::int64_t> second) {
  Dims all = first;
  for (const std::int64_t extent : second) {
    all.push_back(extent);
  }
  return all;
}

// How the elements of an array lie in memory: `distinct` for targets, `any` for sources, whose
// elements may overlap.
enum class Strides : std::uint8_t { contiguous, distinct, any };

// An array in memory of exactly its size, so that AddressSanitizer detects any access outside.
struct Array {
  TensorView view;
  std::vector<std::byte> memory;

  Array(Bytes& in, DType dtype, const Dims& shape, Strides kind)
      : view(TensorView::contiguous(nullptr, dtype, shape)) {
    if (kind == Strides::any && in.one_in(2)) {
      for (int i = 0; i < shape.size(); ++i) {
        view.strides[i] = in.below(64) - 32;
      }
    } else if (kind != Strides::contiguous && in.one_in(2)) {
      set_distinct(in);
    }
    std::int64_t low = 0, high = 0;
    for (int i = 0; i < shape.size(); ++i) {
      const std::int64_t reach = (shape[i] - 1) * view.strides[i];
      (reach < 0 ? low : high) += reach;
    }
    high += static_cast<std::int64_t>(item_size(dtype));
    const bool empty = element_count(shape.from(0)) == 0;
    const int skip = kind == Strides::contiguous || in.one_in(2) ? 0 : in.below(8);
    memory.resize(static_cast<std::size_t>(empty ? 0 : skip + high - low));
    in.fill(memory);
    if (!empty) {
      view.data = memory.data() + skip - low;
    }
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

 private:
  // Any order of the axes, gaps, and negative strides.
  void set_distinct(Bytes& in) {
    std::vector<int> axes(static_cast<std::size_t>(view.rank()));
    std::iota(axes.begin(), axes.end(), 0);
    for (std::size_t i = axes.size(); i > 1; --i) {
      std::swap(axes[i - 1], axes[static_cast<std::size_t>(in.below(static_cast<int>(i)))]);
    }
    auto step = static_cast<std::int64_t>(item_size(view.dtype));
    for (const int axis : axes) {
      step += in.one_in(4) ? in.below(9) : 0;
      view.strides[axis] = in.one_in(4) ? -step : step;
      step *= std::max<std::int64_t>(view.shape[axis], 1);
    }
  }
};

// The exact value of an element. A long double holds every 64-bit integer.
using Number = std::complex<long double>;

template <typename T>
T load(const std::byte* address) {
  T value;
  std::memcpy(&value, address, sizeof(value));
  return value;
}

inline long double load_half(const std::byte* address) {
  const auto bits = load<std::uint16_t>(address);
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  long double size =
      std::ldexp(static_cast<long double>(exponent == 0 ? fraction : fraction + 1024),
                 std::max(exponent, 1) - 25);
  if (exponent == 31) {
    size = fraction == 0 ? std::numeric_limits<long double>::infinity()
                         : std::numeric_limits<long double>::quiet_NaN();
  }
  return (bits & 0x8000) != 0 ? -size : size;
}

inline Number number_at(DType dtype, const std::byte* address) {
  switch (dtype) {
    case DType::boolean:
      return load<std::uint8_t>(address) != 0 ? 1 : 0;
    case DType::uint8:
      return load<std::uint8_t>(address);
    case DType::int8:
      return load<std::int8_t>(address);
    case DType::int16:
      return load<std::int16_t>(address);
    case DType::int32:
      return load<std::int32_t>(address);
    case DType::int64:
      return load<std::int64_t>(address);
    case DType::uint16:
      return load<std::uint16_t>(address);
    case DType::uint32:
      return load<std::uint32_t>(address);
    case DType::uint64:
      return load<std::uint64_t>(address);
    case DType::float16:
      return load_half(address);
    case DType::bfloat16: {
      const std::uint32_t bits = std::uint32_t{load<std::uint16_t>(address)} << 16;
      return load<float>(reinterpret_cast<const std::byte*>(&bits));
    }
    case DType::float32:
      return load<float>(address);
    case DType::float64:
      return load<double>(address);
    case DType::complex64:
      return {load<float>(address), load<float>(address + sizeof(float))};
    case DType::complex128:
      return {load<double>(address), load<double>(address + sizeof(double))};
  }
  std::abort();
}

// Rounds once to a floating type: number of digits, smallest and largest exponent.
inline long double rounded(long double value, int digits, int smallest, int largest) {
  if (value == 0 || !std::isfinite(value)) {
    return value;
  }
  const int last = std::max(std::ilogb(value), smallest) - digits + 1;
  const long double result = std::ldexp(std::nearbyint(std::ldexp(value, -last)), last);
  return std::fabs(result) < std::ldexp(1.0L, largest + 1)
             ? result
             : std::copysign(std::numeric_limits<long double>::infinity(), value);
}

inline long double as_integer(long double value, DTypeKind from, int bits, bool sign) {
  const long double low = sign ? -std::ldexp(1.0L, bits - 1) : 0;
  const long double size = std::ldexp(1.0L, bits);
  if (from == DTypeKind::floating || from == DTypeKind::complex) {
    return std::isnan(value) ? 0 : std::clamp(std::trunc(value), low, low + size - 1) + 0.0L;
  }
  return value - std::floor((value - low) / size) * size;  // exact: |value| is below 2^64
}

// The value after a cast, by the rules in copy.h.
inline Number cast(const Number& value, DType from, DType to) {
  const long double real = value.real();
  const auto bits = static_cast<int>(item_size(to)) * 8;
  switch (to) {
    case DType::boolean:
      return value != Number(0) ? 1 : 0;  // also if a part is NaN
    case DType::float16:
      return rounded(real, 11, -14, 15);
    case DType::bfloat16:
      return rounded(real, 8, -126, 127);
    case DType::float32:
      return rounded(real, 24, -126, 127);
    case DType::float64:
      return rounded(real, 53, -1022, 1023);
    case DType::complex64:
      return {rounded(real, 24, -126, 127), rounded(value.imag(), 24, -126, 127)};
    case DType::complex128:
      return {rounded(real, 53, -1022, 1023), rounded(value.imag(), 53, -1022, 1023)};
    default:
      return as_integer(real, kind_of(from), bits, name_of(to).front() != 'u');
  }
}

inline bool same(long double a, long double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

// Whether an element equals the cast of the source element, or zero if `source` is null.
inline bool is_cast(DType to, const std::byte* actual, DType from, const std::byte* source) {
  const std::size_t bytes = item_size(to);
  if (source == nullptr) {
    return std::all_of(actual, actual + bytes, [](std::byte b) { return b == std::byte{0}; });
  }
  if (to == from) {
    return std::memcmp(actual, source, bytes) == 0;
  }
  const Number got = number_at(to, actual), wanted = cast(number_at(from, source), from, to);
  return same(got.real(), wanted.real()) && same(got.imag(), wanted.imag()) &&
         (to != DType::boolean || load<std::uint8_t>(actual) < 2);
}

// Checks all elements of a target, and that no other byte of its memory changed. `source_of(index)`
// returns the address of an element's source, null for zero, or nothing if it must not change.
template <typename SourceOf>
void check_target(const Array& target, std::vector<std::byte> before, DType from,
                  const SourceOf& source_of) {
  for_each_index(target.view.shape, [&](const Dims& index) {
    const std::byte* element = at(target.view, index);
    const std::optional<const std::byte*> source = source_of(index);
    if (source) {
      EXPECT(is_cast(target.view.dtype, element, from, *source));
      std::copy_n(element, item_size(target.view.dtype),
                  before.begin() + (element - target.memory.data()));
    }
  });
  EXPECT(target.memory == before);
}

}  // namespace pycollect::fuzz
