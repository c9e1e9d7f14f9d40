// Batch: what a collector delivers, read by key and type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pycollect/dtype.h"
#include "pycollect/header.h"
#include "pycollect/key.h"
#include "pycollect/layout.h"
#include "pycollect/slab.h"
#include "pycollect/split.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// The numbers of one leaf of a batch, [W, P, T, *frame], without gaps. A view: the batch, or its
// lease, keeps the memory.
template <typename T>
class Values {
 public:
  Values(T* data, const Dims& shape) : shape_(shape), numbers_(data, count(shape)) {}

  T* data() const { return numbers_.data(); }
  // Of all numbers.
  std::size_t size() const { return numbers_.size(); }
  const Dims& shape() const { return shape_; }
  T& operator[](std::size_t i) const { return numbers_[i]; }
  auto begin() const { return numbers_.begin(); }
  auto end() const { return numbers_.end(); }
  operator std::span<T>() const { return numbers_; }

  // The frames of one trajectory, one after the other.
  std::span<T> of(const Segment& segment) const {
    const std::int64_t frame = element_count(shape_.from(3));
    return numbers_.subspan(
        static_cast<std::size_t>((segment.row * shape_[2] + segment.start) * frame),
        static_cast<std::size_t>(segment.length * frame));
  }

 private:
  static std::size_t count(const Dims& shape) {
    return static_cast<std::size_t>(element_count({shape.begin(), shape.end()}));
  }

  Dims shape_;
  std::span<T> numbers_;
};

// A handle: copies mean the same batch, whose memory goes back to its pool when the last handle,
// and all that holds its lease, is gone. The numbers may be written, they are the holder's. All
// else is immutable, and safe to share between threads.
class Batch {
 public:
  // An episode that ended in the batch.
  struct Episode {
    std::int64_t worker = 0;
    std::int64_t env = 0;
    std::int64_t length = 0;  // in frames, those of batches before among them
    double total_reward = 0;
  };

  // A slab whose every row has its header; throws std::invalid_argument where one does not fit.
  explicit Batch(std::shared_ptr<Slab> slab, std::vector<Episode> episodes = {});

  // The leaf of that key, [W, P, T, *frame]. Throws std::out_of_range, which names the keys that
  // there are, for another one. get() is for a batch in which workers are stacked; it throws
  // std::invalid_argument where the leaf's type is not T. Some 100 ns: look it up once per batch.
  TensorView view(const Key& key) const;
  template <typename T>
  Values<T> get(const Key& key) const& {
    const TensorView found = view_of(key, dtype_of<T>);
    return Values<T>(reinterpret_cast<T*>(found.data), found.shape);
  }
  template <typename T>
  Values<T> get(const Key& key) const&& = delete;  // nobody would keep the memory

  const Layout& layout() const;
  // W, P and T.
  const Geometry& geometry() const;
  // Collected ones; uncollected cells are not counted.
  std::int64_t frames() const;
  // One for each row: which worker, and with which version of the policy it began.
  std::span<const RolloutHeader> headers() const;
  const RolloutHeader& header(std::int64_t row) const;
  std::span<const Episode> episodes() const;

  // Where its trajectories lie, those that go on in other batches among them. Found at the first
  // call, in one pass over the flags.
  const SplitPlan& trajectories() const;

  // What keeps the memory, for tensors over it.
  const std::shared_ptr<Slab>& lease() const;

 private:
  struct State;

  TensorView view_of(const Key& key, DType dtype) const;

  std::shared_ptr<State> state_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
