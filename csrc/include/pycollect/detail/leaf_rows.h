// LeafRows: one leaf of one worker's rows, written frame by frame.
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

// How an array goes into a leaf: its bytes as they are, or its numbers one by one, because a
// narrower or wider type of the same kind is cast, or because there are gaps between them.
enum class Fit : std::uint8_t { plain, converted };

// Frame (p, t) lies at base + p * env_stride + t * frame_bytes. A view: whoever holds one keeps the
// memory. Writing allocates nothing.
//
// A small frame alone costs a cache line, and the next step of its row another visit to it, when
// the rows of many envs have displaced it. So some steps of all envs stand side by side in a
// window, as many as fill a line of each row, to which flush() brings them; at() knows where a
// frame is. The rows of one env, and large frames, need no window.
class LeafRows {
 public:
  // Not bound to memory yet.
  LeafRows(Leaf leaf, std::size_t index, std::int64_t envs, bool batched);

  const Leaf& leaf() const { return leaf_; }
  std::int64_t frame_bytes() const { return frame_bytes_; }
  // What an array for one step looks like: [P, *frame] where batched, else [*frame].
  const Dims& step_shape() const { return step_.shape; }

  // The rows of a worker in a slab of the leaf's layout, from one of its environments on.
  void bind(Slab& slab, std::int64_t row, std::int64_t first_env = 0);
  // The same rows for contiguous memory of one step, [P, *frame]; throws std::invalid_argument
  // where it has another dtype or shape.
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
  // Several steps only where none of them is in the window.
  void fill(std::int64_t env, std::int64_t step, std::int64_t steps, std::uint8_t byte) const {
    std::memset(at(env, step), byte, static_cast<std::size_t>(frame_bytes_ * steps));
  }
  // The first steps of all envs. Frames are one number of that type.
  template <typename T>
  void put_first(std::int64_t steps, T value) const {
    for (std::int64_t env = 0; env < envs_; ++env) {
      std::byte* const row = at(env, 0);
      for (std::size_t i = 0; i < static_cast<std::size_t>(steps); ++i) {
        std::memcpy(row + i * sizeof(value), &value, sizeof(value));
      }
    }
  }
  // One step of all envs. Frames are one number of that type.
  template <typename T>
  void put_all(std::int64_t step, const std::vector<T>& values) {
    write_plain(step, reinterpret_cast<const std::byte*>(values.data()));
  }

  // Whether an array of one step fits as it is.
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
  // How an array of one step fits; what has another kind of number or another shape is refused by
  // std::invalid_argument, which names the leaf. With `exact`, the dtype has to be the leaf's.
  Fit check(const ConstTensorView& source, bool exact = false) const {
    return is_plain(source) ? Fit::plain : check_cast(source, exact);
  }
  // One step of all envs, in an array that was checked for this leaf or another one of its form.
  // Large frames of a large slab go past the caches: whoever hands the slab to another thread calls
  // stream_fence() before.
  void write(std::int64_t step, const ConstTensorView& source, Fit fit) {
    if (fit == Fit::plain) {
      write_plain(step, source.data);
    } else {
      convert(step, source);
    }
  }
  // The same for an array that is_plain().
  void write_plain(std::int64_t step, const std::byte* source);
  // What was written stands in the rows then, all of it; before, only where there is no window. A
  // window goes to its rows as a whole: whoever writes a step of all envs has to write all steps of
  // the rollout, and has nothing in the rows before. Behind the rollout's end the rows hold
  // anything then.
  void flush();

  // Where steps of all envs lie one behind the other, as their arrays come.
  struct Run {
    std::byte* data;
    std::int64_t steps;
  };
  // Whether there are such runs, of more than one step.
  bool has_runs() const { return !window_.empty() || (envs_ == 1 && !streams_); }
  // The one from that step on, the next one to be written, which is the caller's to write. Only
  // where has_runs().
  Run run_from(std::int64_t step) {
    if (window_.empty()) {
      return {at(0, step), row_steps_ - step};
    }
    open_window(step);
    return {slot(step), window_end_ - step};
  }
  std::int64_t step_bytes() const { return envs_ * frame_bytes_; }
  // One env of such an array.
  void write_env(std::int64_t env, std::int64_t step, const ConstTensorView& source, Fit fit) const;
  // Whether these rows are bound to that very array, so that nothing of it has to be written.
  bool is_memory_of(const ConstTensorView& source, Fit fit) const {
    return source.data == base_ && fit == Fit::plain;
  }

 private:
  Fit check_cast(const ConstTensorView& source, bool exact) const;
  void convert(std::int64_t step, const ConstTensorView& source);

  // Where one step of all envs goes, and how far apart they lie there.
  struct Room {
    std::byte* data;
    std::int64_t stride;
  };
  Room room(std::int64_t step);
  // The window is for that step from now on, if it was not.
  void open_window(std::int64_t step);
  std::byte* slot(std::int64_t step) const {
    return const_cast<std::byte*>(window_.data()) + (step - window_begin_) * envs_ * frame_bytes_;
  }

  // In the order in which each step needs them.
  std::byte* base_ = nullptr;
  std::int64_t env_stride_ = 0;
  std::int64_t frame_bytes_;
  std::int64_t envs_;
  std::int64_t window_begin_ = 0, window_end_ = 0;  // the steps that the window is for
  std::int64_t window_steps_ = 0;
  std::int64_t row_steps_ = 0;
  bool streams_ = false;
  bool batched_;
  TensorView step_;                // what an array for one step looks like; its address is not used
  std::vector<std::byte> window_;  // [steps, P, *frame]; empty: there is none
  Leaf leaf_;
  std::size_t index_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
