#include "pycollect/tensor_view.h"

#include <algorithm>
#include <stdexcept>

#include "pycollect/detail/checked.h"

namespace pycollect::inline PYCOLLECT_ABI {

Dims::Dims(std::initializer_list<std::int64_t> values)
    : Dims(std::span<const std::int64_t>(values.begin(), values.size())) {}

Dims::Dims(std::span<const std::int64_t> values) {
  for (std::int64_t value : values) {
    push_back(value);
  }
}

void Dims::throw_too_long() {
  throw std::invalid_argument("shape: expected at most " + std::to_string(kMaxRank) +
                              " dimensions, got more");
}

std::string to_string(const Dims& dims) {
  std::string text = "[";
  for (int i = 0; i < dims.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
  }
  return text + "]";
}

std::int64_t element_count(std::span<const std::int64_t> shape) {
  bool empty = false;
  for (std::int64_t extent : shape) {
    if (extent < 0) {
      throw std::invalid_argument("shape: expected extents >= 0, got " + std::to_string(extent));
    }
    empty = empty || extent == 0;
  }
  std::int64_t count = 1;
  for (std::int64_t extent : shape) {
    count = empty ? 0 : checked_mul(count, extent);
  }
  return count;
}

TensorView TensorView::contiguous(void* data, DType dtype, const Dims& shape) {
  TensorView view{static_cast<std::byte*>(data), dtype, shape, shape, Device{}};
  std::int64_t stride = static_cast<std::int64_t>(item_size(dtype));
  for (int i = shape.size() - 1; i >= 0; --i) {
    view.strides[i] = stride;
    stride = checked_mul(stride, std::max<std::int64_t>(shape[i], 1));
  }
  return view;
}

std::int64_t TensorView::bytes() const {
  return checked_mul(count(), static_cast<std::int64_t>(item_size(dtype)));
}

void detail::refuse_dtype(DType wanted, DType actual) {
  throw std::invalid_argument("dtype: expected " + std::string(name_of(wanted)) + ", got " +
                              std::string(name_of(actual)));
}

void detail::expect_count(std::size_t numbers, const Dims& shape) {
  const std::int64_t wanted = element_count({shape.begin(), shape.end()});
  if (static_cast<std::int64_t>(numbers) != wanted) {
    throw std::invalid_argument("numbers: expected " + std::to_string(wanted) + " for shape " +
                                to_string(shape) + ", got " + std::to_string(numbers));
  }
}

TensorView TensorView::operator[](std::int64_t i) const {
  if (rank() == 0 || i < 0 || i >= shape[0]) {
    throw std::out_of_range("index: expected an index into shape " + to_string(shape) + ", got " +
                            std::to_string(i));
  }
  return {data + i * strides[0], dtype, Dims(shape.from(1)), Dims(strides.from(1)), device};
}

}  // namespace pycollect::inline PYCOLLECT_ABI
