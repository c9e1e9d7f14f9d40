// LeafRows: the rows of one leaf of one worker, written frame by frame.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pycollect/copy.h"
#include "pycollect/layout.h"
#include "pycollect/slab.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// How an array is written into a leaf. `plain` copies its bytes. `converted` copies its numbers one
// by one, because they need a cast to a type of the same kind, or because there are gaps between
// them.
enum class Fit : std::uint8_t { plain, converted };

// Frame (p, t) is at base + p * env_stride + t * frame_bytes. A view: its holder keeps the memory
// alive. Writing allocates nothing.
//
// A single small frame uses only a part of a cache line. The next step of its row would need this
// line again, after the rows of the other environments have displaced it. Therefore a window
// collects some steps of all environments, enough to fill a line of each row, and flush() copies
// them to the rows; at() finds the current place of a frame. The rows of a single environment and
// large frames need no window.
class LeafRows {
 public:
  // The rows are not bound to memory yet.
  LeafRows(Leaf leaf, std::size_t index, std::int64_t envs, bool batched);

  const Leaf& leaf() const { return leaf_; }
  std::int64_t frame_bytes() const { return frame_bytes_; }
  // The shape of an array for one step: [P, *frame] if batched, otherwise [*frame].
  const Dims& step_shape() const { return step_.shape; }

  // Binds the rows to a worker's rows in a slab of the leaf's layout, starting at one of its
  // environments.
  void bind(Slab& slab, std::int64_t row, std::int64_t first_env = 0);
  // Binds the rows to contiguous memory of one step, [P, *frame]. Throws std::invalid_argument if
  // it has another dtype or shape.
  void bind(const TensorView& step);

  std::byte* at(std::int64_t env, std::int64_t step) const {
    if (step >= window_begin_ && step < window_end_) {
      return slot(step) + env * frame_bytes_;
    }
    return base_ + env * env_stride_ + step * frame_bytes_;
  }
  template <typename T>
  void put(std::int64_t env, std::int64_t step, T value) const {
    std::memcpy(at(env, step), &value, sizeof(value));
  }
  // For more than one step, none of them may be in the window.
  void fill(std::int64_t env, std::int64_t step, std::int64_t steps, std::uint8_t byte) const {
    std::memset(at(env, step), byte, static_cast<std::size_t>(frame_bytes_ * steps));
  }
  // Writes the first `steps` steps of all environments. A frame must be one number of this type.
  template <typename T>
  void put_first(std::int64_t steps, T value) const {
    for (std::int64_t env = 0; env < envs_; ++env) {
      std::byte* const row = at(env, 0);
      for (std::size_t i = 0; i < static_cast<std::size_t>(steps); ++i) {
        std::memcpy(row + i * sizeof(value), &value, sizeof(value));
      }
    }
  }
  // Writes one step of all environments. A frame must be one number of this type.
  template <typename T>
  void put_all(std::int64_t step, const std::vector<T>& values) {
    write_plain(step, reinterpret_cast<const std::byte*>(values.data()));
  }

  // Whether an array of one step can be copied as it is.
  bool is_plain(const ConstTensorView& source) const {
    const int rank = step_.rank();
    if (source.dtype != step_.dtype || source.device != step_.device || source.rank() != rank) {
      return false;
    }
    for (int i = 0; i < rank; ++i) {
      if (source.shape[i] != step_.shape[i] || source.strides[i] != step_.strides[i]) {
        return source.shape == step_.shape && source.is_contiguous();
      }
    }
    return true;
  }
  // Returns how an array of one step is written. Throws std::invalid_argument, which names the
  // leaf, for another kind of number or another shape. With `exact`, the dtype must equal the
  // leaf's.
  Fit check(const ConstTensorView& source, bool exact = false) const {
    return is_plain(source) ? Fit::plain : check_cast(source, exact);
  }
  // Writes one step of all environments. The array must have been checked for this leaf or another
  // leaf of the same form. Large frames of a large slab are streamed: call stream_fence() before
  // another thread reads the slab.
  void write(std::int64_t step, const ConstTensorView& source, Fit fit) {
    if (fit == Fit::plain) {
      write_plain(step, source.data);
    } else {
      convert(step, source);
    }
  }
  // Like write(), for an array that is_plain().
  void write_plain(std::int64_t step, const std::byte* source);
  // Copies the window to the rows. Without a window, writes go to the rows at once. A window is
  // copied as a whole. Code that writes a step of all environments must therefore write all steps
  // of the rollout, and must not write the rows earlier. The rows after the end of the rollout are
  // then undefined.
  void flush();

  // Consecutive steps of all environments, [steps, P, *frame], for direct writing.
  struct Run {
    std::byte* data;
    std::int64_t steps;
  };
  // Whether runs of more than one step exist.
  bool has_runs() const { return !window_.empty() || (envs_ == 1 && !streams_); }
  // Returns the run that starts at this step, which must be the next one. The caller writes it.
  // Only if has_runs().
  Run run_from(std::int64_t step) {
    if (window_.empty()) {
      return {at(0, step), row_steps_ - step};
    }
    open_window(step);
    return {slot(step), window_end_ - step};
  }
  std::int64_t step_bytes() const { return envs_ * frame_bytes_; }
  // Writes one environment of such an array.
  void write_env(std::int64_t env, std::int64_t step, const ConstTensorView& source, Fit fit) const;
  // Whether the rows are bound to this very array, so that nothing has to be written.
  bool is_memory_of(const ConstTensorView& source, Fit fit) const {
    return source.data == base_ && fit == Fit::plain;
  }

 private:
  Fit check_cast(const ConstTensorView& source, bool exact) const;
  void convert(std::int64_t step, const ConstTensorView& source);

  // The destination of one step, and the distance between two environments in it.
  struct Room {
    std::byte* data;
    std::int64_t stride;
  };
  Room room(std::int64_t step);
  // Moves the window to this step, if it is not there already.
  void open_window(std::int64_t step);
  std::byte* slot(std::int64_t step) const {
    return const_cast<std::byte*>(window_.data()) + (step - window_begin_) * envs_ * frame_bytes_;
  }

  // In the order in which each step needs the members.
  std::byte* base_ = nullptr;
  std::int64_t env_stride_ = 0;
  std::int64_t frame_bytes_;
  std::int64_t envs_;
  std::int64_t window_begin_ = 0, window_end_ = 0;  // the steps in the window
  std::int64_t window_steps_ = 0;
  std::int64_t row_steps_ = 0;
  bool streams_ = false;
  bool batched_;
  TensorView step_;                // the form of an array for one step; its address is not used
  std::vector<std::byte> window_;  // [steps, P, *frame]; empty without a window
  Leaf leaf_;
  std::size_t index_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
