#include "pycollect/detail/leaf_rows.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "pycollect/copy.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

// Environments may return another width of the same kind of number, such as float64 for a float32
// space; the recorder casts it. A float for an integer space is a mistake.
bool castable(DType from, DType to) {
  const auto rank = [](DType dtype) { return static_cast<int>(kind_of(dtype)); };
  return rank(from) <= rank(to);
}

// The processor fetches consecutive lines ahead by itself, but not rows that are far apart. A write
// to such a row would wait for it.
constexpr std::int64_t kRowsAhead = 16;
constexpr std::int64_t kLineBytes = 64;
constexpr std::int64_t kMostPrefetchedBytes = 4 * kLineBytes;

void prefetch_row(const std::byte* row, std::int64_t bytes) {
#ifdef __GNUC__
  bytes = std::min(bytes, kMostPrefetchedBytes);
  for (std::int64_t at = 0; at < bytes; at += kLineBytes) {
    __builtin_prefetch(row + at, 1);
  }
  __builtin_prefetch(row + bytes - 1, 1);
#endif
}

// Copies n frames of `bytes` bytes each. With a constant size, the compiler emits moves instead of
// calls of memcpy.
template <std::size_t bytes>
void move_small(std::byte* dst, std::int64_t dst_stride, const std::byte* src,
                std::int64_t src_stride, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    std::memcpy(dst + i * dst_stride, src + i * src_stride, bytes);
  }
}

void move_frames(std::byte* dst, std::int64_t dst_stride, const std::byte* src,
                 std::int64_t src_stride, std::int64_t n, std::int64_t bytes) {
  switch (bytes) {
    case 1:
      return move_small<1>(dst, dst_stride, src, src_stride, n);
    case 4:
      return move_small<4>(dst, dst_stride, src, src_stride, n);
    case 8:
      return move_small<8>(dst, dst_stride, src, src_stride, n);
    case 16:
      return move_small<16>(dst, dst_stride, src, src_stride, n);
    default:
      for (std::int64_t i = 0; i < n; ++i) {
        if (i + kRowsAhead < n) {
          prefetch_row(dst + (i + kRowsAhead) * dst_stride, bytes);
        }
        copy_frame(dst + i * dst_stride, src + i * src_stride, static_cast<std::size_t>(bytes));
      }
  }
}

// Smaller frames gain nothing from non-temporal stores.
constexpr std::int64_t kStreamFrameBytes = 4096;

// With at least kWindowEnvs environments, frames of up to kWindowFrameBytes go through a window:
// one cache line per environment.
constexpr std::int64_t kWindowFrameBytes = 32;
constexpr std::int64_t kWindowRowBytes = 64;
constexpr std::int64_t kWindowEnvs = 8;

#ifdef __SSE2__

__m128i load16(const std::byte* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

void store16(std::byte* to, __m128i value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
}

// Transposes a square of numbers with 16 bytes per side, by 16-byte stores. Single numbers would
// need two or four times as many stores.
template <std::size_t bytes>
void transpose(std::byte* to, std::int64_t to_stride, const std::byte* from,
               std::int64_t from_stride) {
  if constexpr (bytes == 8) {
    const __m128i a = load16(from), b = load16(from + from_stride);
    store16(to, _mm_unpacklo_epi64(a, b));
    store16(to + to_stride, _mm_unpackhi_epi64(a, b));
  } else {
    const __m128i a = load16(from), b = load16(from + from_stride);
    const __m128i c = load16(from + 2 * from_stride), d = load16(from + 3 * from_stride);
    const __m128i low_ab = _mm_unpacklo_epi32(a, b), high_ab = _mm_unpackhi_epi32(a, b);
    const __m128i low_cd = _mm_unpacklo_epi32(c, d), high_cd = _mm_unpackhi_epi32(c, d);
    store16(to, _mm_unpacklo_epi64(low_ab, low_cd));
    store16(to + to_stride, _mm_unpackhi_epi64(low_ab, low_cd));
    store16(to + 2 * to_stride, _mm_unpacklo_epi64(high_ab, high_cd));
    store16(to + 3 * to_stride, _mm_unpackhi_epi64(high_ab, high_cd));
  }
}

#endif

// Copies steps of all environments, [steps, envs, frame], to their rows.
template <std::size_t bytes>
void move_steps(std::byte* rows, std::int64_t env_stride, const std::byte* window,
                std::int64_t envs, std::int64_t steps) {
  constexpr auto kSize = static_cast<std::int64_t>(bytes);
  constexpr std::int64_t kWhole = kWindowRowBytes / kSize;
  std::int64_t env = 0;
#ifdef __SSE2__
  if constexpr (bytes == 4 || bytes == 8) {
    constexpr std::int64_t kSide = 16 / kSize;
    if (steps == kWhole) {
      for (; env + kSide <= envs; env += kSide) {
        if (env + kRowsAhead + kSide <= envs) {
          for (std::int64_t i = 0; i < kSide; ++i) {
            prefetch_row(rows + (env + kRowsAhead + i) * env_stride, kWindowRowBytes);
          }
        }
        for (std::int64_t step = 0; step < kWhole; step += kSide) {
          transpose<bytes>(rows + env * env_stride + step * kSize, env_stride,
                           window + (step * envs + env) * kSize, envs * kSize);
        }
      }
    }
  }
#endif
  for (; env < envs; ++env) {
    std::byte* const row = rows + env * env_stride;
    if (env + kRowsAhead < envs) {
      prefetch_row(row + kRowsAhead * env_stride, steps * kSize);
    }
    const std::byte* const first = window + env * kSize;
    if (steps == kWhole) {  // a constant for the compiler
      move_small<bytes>(row, kSize, first, envs * kSize, kWhole);
    } else {
      move_small<bytes>(row, kSize, first, envs * kSize, steps);
    }
  }
}

}  // namespace

LeafRows::LeafRows(Leaf leaf, std::size_t index, std::int64_t envs, bool batched)
    : frame_bytes_(leaf.frame_bytes()),
      envs_(envs),
      batched_(batched),
      leaf_(std::move(leaf)),
      index_(index) {
  Dims shape;
  if (batched) {
    shape.push_back(envs);
  }
  for (std::int64_t extent : leaf_.shape) {
    shape.push_back(extent);
  }
  step_ = TensorView::contiguous(nullptr, leaf_.dtype, shape);
}

void LeafRows::bind(Slab& slab, std::int64_t row, std::int64_t first_env) {
  const Placement& placement = slab.placement();
  const Placement::RowStrides strides = placement.row_strides(index_);
  env_stride_ = strides.env;
  base_ = slab.data() + placement.offset(index_) + row * strides.worker + first_env * strides.env;
  streams_ = slab.streams() && frame_bytes_ >= kStreamFrameBytes && frame_bytes_ % 64 == 0;
  if (frame_bytes_ > 0 && frame_bytes_ <= kWindowFrameBytes && envs_ >= kWindowEnvs) {
    window_steps_ = kWindowRowBytes / frame_bytes_;
    window_.resize(static_cast<std::size_t>(window_steps_ * envs_ * frame_bytes_));
  }
  window_begin_ = window_end_ = 0;
  row_steps_ = placement.geometry().steps;
}

void LeafRows::bind(const TensorView& step) {
  if (check(step, true) != Fit::plain) {
    throw std::invalid_argument(to_string(leaf_.key) + ": expected contiguous memory");
  }
  base_ = step.data;
  env_stride_ = frame_bytes_;
  streams_ = false;
}

Fit LeafRows::check_cast(const ConstTensorView& source, bool exact) const {
  const bool fits = exact ? source.dtype == leaf_.dtype : castable(source.dtype, leaf_.dtype);
  if (fits && source.shape == step_.shape && source.device.kind == DeviceKind::cpu) {
    return Fit::converted;
  }
  throw std::invalid_argument(
      to_string(leaf_.key) + ": expected " + std::string(name_of(leaf_.dtype)) + " of shape " +
      to_string(step_.shape) + " in host memory, got " + std::string(name_of(source.dtype)) +
      " of shape " + to_string(source.shape) +
      (source.device.kind == DeviceKind::cpu ? "" : " on a device"));
}

void LeafRows::open_window(std::int64_t step) {
  if (step < window_begin_ || step >= window_end_) {
    flush();
    window_begin_ = step;
    window_end_ = step + window_steps_;
  }
}

LeafRows::Room LeafRows::room(std::int64_t step) {
  if (window_.empty()) {
    return {base_ + step * frame_bytes_, env_stride_};
  }
  open_window(step);
  return {slot(step), frame_bytes_};
}

void LeafRows::flush() {
  const std::int64_t steps = std::min(window_end_, row_steps_) - window_begin_;
  std::byte* const rows = base_ + window_begin_ * frame_bytes_;
  window_begin_ = window_end_;
  if (steps <= 0) {
    return;
  }
  switch (frame_bytes_) {
    case 1:
      return move_steps<1>(rows, env_stride_, window_.data(), envs_, steps);
    case 4:
      return move_steps<4>(rows, env_stride_, window_.data(), envs_, steps);
    case 8:
      return move_steps<8>(rows, env_stride_, window_.data(), envs_, steps);
    case 12:
      return move_steps<12>(rows, env_stride_, window_.data(), envs_, steps);
    case 16:
      return move_steps<16>(rows, env_stride_, window_.data(), envs_, steps);
    case 24:
      return move_steps<24>(rows, env_stride_, window_.data(), envs_, steps);
    default:
      for (std::int64_t env = 0; env < envs_; ++env) {
        move_frames(rows + env * env_stride_, frame_bytes_, window_.data() + env * frame_bytes_,
                    envs_ * frame_bytes_, steps, frame_bytes_);
      }
  }
}

void LeafRows::write_plain(std::int64_t step, const std::byte* source) {
  const Room to = room(step);
  if (streams_) {
    for (std::int64_t env = 0; env < envs_; ++env) {
      stream_frame(to.data + env * to.stride, source + env * frame_bytes_,
                   static_cast<std::size_t>(frame_bytes_));
    }
  } else if (to.stride == frame_bytes_ || envs_ == 1) {
    copy_frame(to.data, source, static_cast<std::size_t>(envs_ * frame_bytes_));
  } else {
    move_frames(to.data, to.stride, source, frame_bytes_, envs_, frame_bytes_);
  }
}

void LeafRows::convert(std::int64_t step, const ConstTensorView& source) {
  const Room to = room(step);
  TensorView target = step_;
  target.data = to.data;
  if (batched_) {
    target.strides[0] = to.stride;
  }
  copy(target, source);
}

void LeafRows::write_env(std::int64_t env, std::int64_t step, const ConstTensorView& source,
                         Fit fit) const {
  if (fit == Fit::plain) {
    const auto move = streams_ ? stream_frame : copy_frame;
    move(at(env, step), source.data + env * frame_bytes_, static_cast<std::size_t>(frame_bytes_));
    return;
  }
  copy(TensorView::contiguous(at(env, step), leaf_.dtype, leaf_.shape),
       batched_ ? source[env] : source);
}

}  // namespace pycollect::inline PYCOLLECT_ABI
