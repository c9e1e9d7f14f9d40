// LeafRows: one leaf of one worker's rows, written frame by frame.
#pragma once

#include <cstdint>
#include <cstring>

#include "pycollect/layout.h"
#include "pycollect/slab.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Frame (p, t) lies at base + p * env_stride + t * frame_bytes. A view: whoever holds one keeps the
// memory. Writing allocates nothing.
class LeafRows {
 public:
  // Not bound to memory yet.
  LeafRows(Leaf leaf, std::size_t index, std::int64_t envs, bool batched);

  const Leaf& leaf() const { return leaf_; }
  std::int64_t frame_bytes() const { return frame_bytes_; }
  // What an array for one step looks like: [P, *frame] where batched, else [*frame].
  const Dims& step_shape() const { return step_shape_; }

  // The rows of a worker in a slab of the leaf's layout.
  void bind(Slab& slab, std::int64_t row);
  // The same rows for contiguous memory of one step, [P, *frame]; throws std::invalid_argument
  // where it has another dtype or shape.
  void bind(const TensorView& step);

  std::byte* at(std::int64_t env, std::int64_t step) const {
    return base_ + env * env_stride_ + step * frame_bytes_;
  }
  template <typename T>
  void put(std::int64_t env, std::int64_t step, T value) const {
    std::memcpy(at(env, step), &value, sizeof(value));
  }
  void fill(std::int64_t env, std::int64_t step, std::int64_t steps, std::uint8_t byte) const {
    std::memset(at(env, step), byte, static_cast<std::size_t>(frame_bytes_ * steps));
  }

  // One step of all envs. Large frames of a large slab go past the caches: whoever hands the slab
  // to another thread calls stream_fence() before. A narrower or wider number of the same kind is
  // cast; throws std::invalid_argument, which names the leaf, for another kind or shape.
  void write(std::int64_t step, const TensorView& source) const;
  // What write() does after its check, for whoever checked already: an array that fits is stored as
  // it is where it has the leaf's dtype and no gaps, else converted.
  void write_checked(std::int64_t step, const TensorView& source) const {
    if (source.dtype == leaf_.dtype && source.is_contiguous()) {
      store(step, source.data);
    } else {
      convert(step, source);
    }
  }
  // Whether these rows are bound to that very array, so that nothing of it has to be written.
  bool is_memory_of(const TensorView& source) const {
    return source.data == base_ && source.dtype == leaf_.dtype && source.is_contiguous();
  }
  // One env of such an array.
  void write_env(std::int64_t env, std::int64_t step, const TensorView& source) const;
  // What write() checks; with `exact`, the dtype has to be the leaf's.
  void check(const TensorView& source, bool exact = false) const;

 private:
  void store(std::int64_t step, const std::byte* source) const;
  void convert(std::int64_t step, const TensorView& source) const;

  Leaf leaf_;
  std::size_t index_;
  std::int64_t envs_;
  bool batched_;
  Dims step_shape_;
  std::int64_t frame_bytes_;
  std::byte* base_ = nullptr;
  std::int64_t env_stride_ = 0;
  bool streams_ = false;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
