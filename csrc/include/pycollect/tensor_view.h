// TensorView: where an array lies and what it looks like. A value that never owns: whoever passes
// one keeps the memory alive for the length of the call, or says otherwise.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>

#include "pycollect/dtype.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// A shape or a list of strides without an allocation, at most kMaxRank long.
class Dims {
 public:
  static constexpr int kMaxRank = 16;

  Dims() = default;
  Dims(std::initializer_list<std::int64_t> values);
  explicit Dims(std::span<const std::int64_t> values);

  // Throws std::invalid_argument past kMaxRank.
  void push_back(std::int64_t value) {
    if (size_ == kMaxRank) {
      throw_too_long();
    }
    values_[static_cast<std::size_t>(size_++)] = value;
  }

  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::int64_t operator[](int i) const { return values_[static_cast<std::size_t>(i)]; }
  std::int64_t& operator[](int i) { return values_[static_cast<std::size_t>(i)]; }
  const std::int64_t* begin() const { return values_.data(); }
  const std::int64_t* end() const { return values_.data() + size_; }
  std::span<const std::int64_t> from(int first) const { return {begin() + first, end()}; }

  // A loop of its own: they are a few, for which a call of memcmp takes longer.
  friend bool operator==(const Dims& a, const Dims& b) {
    bool equal = a.size_ == b.size_;
    for (int i = 0; equal && i < a.size_; ++i) {
      equal = a[i] == b[i];
    }
    return equal;
  }

 private:
  [[noreturn]] static void throw_too_long();

  int size_ = 0;  // first: mostly there are one or two values, on its cache line then
  std::array<std::int64_t, kMaxRank> values_{};
};

// "[2, 3]", for error texts.
std::string to_string(const Dims& dims);

// The number of elements of that shape; throws std::length_error where it does not fit.
std::int64_t element_count(std::span<const std::int64_t> shape);

namespace detail {

inline bool is_contiguous(DType dtype, const Dims& shape, const Dims& strides) {
  auto expected = static_cast<std::int64_t>(item_size(dtype));
  for (int i = shape.size() - 1; i >= 0; --i) {
    if (shape[i] == 0) {
      return true;
    }
    if (shape[i] != 1 && strides[i] != expected) {
      return false;
    }
    expected *= shape[i];
  }
  return true;
}

[[noreturn]] void refuse_dtype(DType wanted, DType came);
inline void expect_dtype(DType wanted, DType came) {
  if (wanted != came) {
    refuse_dtype(wanted, came);
  }
}

}  // namespace detail

enum class DeviceKind : std::uint8_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

struct TensorView {
  std::byte* data = nullptr;
  DType dtype = DType::uint8;
  Dims shape;
  Dims strides;  // in bytes
  Device device;

  // A C-contiguous array of that type and shape.
  static TensorView contiguous(void* data, DType dtype, const Dims& shape);

  int rank() const { return shape.size(); }
  std::int64_t count() const { return element_count({shape.begin(), shape.end()}); }
  std::int64_t bytes() const;
  bool is_contiguous() const { return detail::is_contiguous(dtype, shape, strides); }
  // The view of element i of the first dimension.
  TensorView operator[](std::int64_t i) const;
  // Its numbers; throws std::invalid_argument where they are of another type.
  template <typename T>
  T* as() const {
    detail::expect_dtype(dtype_of<T>, dtype);
    return reinterpret_cast<T*>(data);
  }
};

// The same over memory that is only read: what a source is. Every TensorView is one, too.
struct ConstTensorView {
  const std::byte* data = nullptr;
  DType dtype = DType::uint8;
  Dims shape;
  Dims strides;  // in bytes
  Device device;

  ConstTensorView() = default;
  ConstTensorView(const TensorView& view)
      : data(view.data),
        dtype(view.dtype),
        shape(view.shape),
        strides(view.strides),
        device(view.device) {}
  ConstTensorView(const std::byte* address, DType type, const Dims& extents, const Dims& steps,
                  Device where)
      : data(address), dtype(type), shape(extents), strides(steps), device(where) {}
  static ConstTensorView contiguous(const void* data, DType dtype, const Dims& shape) {
    return TensorView::contiguous(const_cast<void*>(data), dtype, shape);
  }

  int rank() const { return shape.size(); }
  std::int64_t count() const { return element_count({shape.begin(), shape.end()}); }
  std::int64_t bytes() const { return writable().bytes(); }
  bool is_contiguous() const { return detail::is_contiguous(dtype, shape, strides); }
  ConstTensorView operator[](std::int64_t i) const { return writable()[i]; }
  template <typename T>
  const T* as() const {
    detail::expect_dtype(dtype_of<T>, dtype);
    return reinterpret_cast<const T*>(data);
  }

 private:
  // Only to ask it what does not depend on that.
  TensorView writable() const {
    return {const_cast<std::byte*>(data), dtype, shape, strides, device};
  }
};

namespace detail {

void expect_count(std::size_t numbers, const Dims& shape);

}  // namespace detail

// Numbers of C++'s own as an array of that shape, without gaps. Throws std::invalid_argument where
// there are more or fewer of them than it has.
template <typename T, std::size_t n>
auto view(std::span<T, n> numbers, const Dims& shape) {
  detail::expect_count(numbers.size(), shape);
  using View = std::conditional_t<std::is_const_v<T>, ConstTensorView, TensorView>;
  return View::contiguous(numbers.data(), dtype_of<T>, shape);
}

}  // namespace pycollect::inline PYCOLLECT_ABI
