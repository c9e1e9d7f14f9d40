#include "pycollect/detail/leaf_rows.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "pycollect/copy.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

// One environment may answer with another width of the same kind of number (float64 where the
// space says float32): that is cast. A float where integers are promised is a mistake.
bool castable(DType from, DType to) {
  const auto rank = [](DType dtype) { return static_cast<int>(kind_of(dtype)); };
  return rank(from) <= rank(to);
}

// n frames of `bytes` bytes each; small ones by fixed-size moves, which a loop of memcpy is not.
template <std::size_t bytes>
void scatter_small(std::byte* dst, std::int64_t dst_stride, const std::byte* src, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    std::memcpy(dst + i * dst_stride, src + i * static_cast<std::int64_t>(bytes), bytes);
  }
}

// Below this a frame is not worth non-temporal stores, wherever it goes.
constexpr std::int64_t kStreamBytes = 4096;

void scatter(std::byte* dst, std::int64_t dst_stride, const std::byte* src, std::int64_t n,
             std::int64_t bytes) {
  switch (bytes) {
    case 1:
      return scatter_small<1>(dst, dst_stride, src, n);
    case 4:
      return scatter_small<4>(dst, dst_stride, src, n);
    case 8:
      return scatter_small<8>(dst, dst_stride, src, n);
    case 16:
      return scatter_small<16>(dst, dst_stride, src, n);
    default:
      for (std::int64_t i = 0; i < n; ++i) {
        copy_frame(dst + i * dst_stride, src + i * bytes, static_cast<std::size_t>(bytes));
      }
  }
}

}  // namespace

LeafRows::LeafRows(Leaf leaf, std::size_t index, std::int64_t envs, bool batched)
    : leaf_(std::move(leaf)),
      index_(index),
      envs_(envs),
      batched_(batched),
      frame_bytes_(leaf_.frame_bytes()) {
  Dims shape;
  if (batched) {
    shape.push_back(envs);
  }
  for (std::int64_t extent : leaf_.shape) {
    shape.push_back(extent);
  }
  step_ = TensorView::contiguous(nullptr, leaf_.dtype, shape);
}

void LeafRows::bind(Slab& slab, std::int64_t row) {
  const TensorView rows = slab.rows(index_, row);
  base_ = rows.data;
  env_stride_ = rows.strides[0];
  streams_ = slab.streams() && frame_bytes_ >= kStreamBytes && frame_bytes_ % 64 == 0;
}

void LeafRows::bind(const TensorView& step) {
  if (check(step, true) != Fit::plain) {
    throw std::invalid_argument(to_string(leaf_.key) + ": expected contiguous memory");
  }
  base_ = step.data;
  env_stride_ = frame_bytes_;
  streams_ = false;
}

Fit LeafRows::check_cast(const TensorView& source, bool exact) const {
  const bool fits = exact ? source.dtype == leaf_.dtype : castable(source.dtype, leaf_.dtype);
  if (fits && source.shape == step_.shape && source.device.kind == DeviceKind::cpu) {
    return Fit::converted;
  }
  throw std::invalid_argument(
      to_string(leaf_.key) + ": expected " + std::string(name_of(leaf_.dtype)) + " of shape " +
      to_string(step_.shape) + ", got " + std::string(name_of(source.dtype)) + " of shape " +
      to_string(source.shape));
}

void LeafRows::store(std::int64_t step, const std::byte* source) const {
  if (!streams_) {
    scatter(at(0, step), env_stride_, source, envs_, frame_bytes_);
    return;
  }
  for (std::int64_t env = 0; env < envs_; ++env) {
    stream_frame(at(env, step), source + env * frame_bytes_,
                 static_cast<std::size_t>(frame_bytes_));
  }
}

void LeafRows::convert(std::int64_t step, const TensorView& source) const {
  TensorView target = step_;
  target.data = at(0, step);
  if (batched_) {
    target.strides[0] = env_stride_;
  }
  copy(target, source);
}

void LeafRows::write_env(std::int64_t env, std::int64_t step, const TensorView& source,
                         Fit fit) const {
  if (fit == Fit::plain) {
    copy_frame(at(env, step), source.data + env * frame_bytes_,
               static_cast<std::size_t>(frame_bytes_));
    return;
  }
  copy(TensorView::contiguous(at(env, step), leaf_.dtype, leaf_.shape),
       batched_ ? source[env] : source);
}

}  // namespace pycollect::inline PYCOLLECT_ABI
