// TensorView: address, type, shape and strides of an array. It does not own the memory: unless
// stated otherwise, the caller keeps the memory alive for the duration of a call.
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

// A shape or a list of strides, of at most kMaxRank numbers. Never allocates.
class Dims {
 public:
  static constexpr int kMaxRank = 16;

  Dims() = default;
  Dims(std::initializer_list<std::int64_t> values);
  explicit Dims(std::span<const std::int64_t> values);

  // Throws std::invalid_argument if there are kMaxRank numbers already.
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

  // An explicit loop: for so few numbers a call of memcmp takes longer.
  friend bool operator==(const Dims& a, const Dims& b) {
    bool equal = a.size_ == b.size_;
    for (int i = 0; equal && i < a.size_; ++i) {
      equal = a[i] == b[i];
    }
    return equal;
  }

 private:
  [[noreturn]] static void throw_too_long();

  int size_ = 0;  // first: it shares a cache line with the first values, usually the only ones
  std::array<std::int64_t, kMaxRank> values_{};
};

// "[2, 3]", for error messages.
std::string to_string(const Dims& dims);

// The number of elements of a shape. Throws std::length_error if it does not fit in 64 bits.
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

  // Returns the view of a C-contiguous array.
  static TensorView contiguous(void* data, DType dtype, const Dims& shape);

  int rank() const { return shape.size(); }
  std::int64_t count() const { return element_count({shape.begin(), shape.end()}); }
  std::int64_t bytes() const;
  bool is_contiguous() const { return detail::is_contiguous(dtype, shape, strides); }
  // Returns the view of element i of the first dimension.
  TensorView operator[](std::int64_t i) const;
  // Returns the typed address. Throws std::invalid_argument if the type differs.
  template <typename T>
  T* as() const {
    detail::expect_dtype(dtype_of<T>, dtype);
    return reinterpret_cast<T*>(data);
  }
};

// A read-only view, for sources. Every TensorView converts to it.
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
  // For queries that do not depend on constness.
  TensorView writable() const {
    return {const_cast<std::byte*>(data), dtype, shape, strides, device};
  }
};

namespace detail {

void expect_count(std::size_t numbers, const Dims& shape);

}  // namespace detail

// Makes a view of contiguous C++ numbers with this shape. Throws std::invalid_argument if the
// number of elements differs from the shape's.
template <typename T, std::size_t n>
auto view(std::span<T, n> numbers, const Dims& shape) {
  detail::expect_count(numbers.size(), shape);
  using View = std::conditional_t<std::is_const_v<T>, ConstTensorView, TensorView>;
  return View::contiguous(numbers.data(), dtype_of<T>, shape);
}

}  // namespace pycollect::inline PYCOLLECT_ABI
