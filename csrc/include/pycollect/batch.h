// Batch: a batch of a collector, read by key and type.
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

// The numbers of one leaf of a batch, contiguous, [W, P, T, *frame]. A view: it is valid as long as
// the batch or its lease exists.
template <typename T>
class Values {
 public:
  Values(T* data, const Dims& shape) : shape_(shape), numbers_(data, count(shape)) {}

  T* data() const { return numbers_.data(); }
  // The number of elements, over all dimensions.
  std::size_t size() const { return numbers_.size(); }
  const Dims& shape() const { return shape_; }
  T& operator[](std::size_t i) const { return numbers_[i]; }
  auto begin() const { return numbers_.begin(); }
  auto end() const { return numbers_.end(); }
  operator std::span<T>() const { return numbers_; }

  // The frames of one trajectory of this batch, in order of time.
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

// A handle to a batch; copies of it share the same memory. The memory returns to its pool when the
// last handle and the last holder of the lease are gone. The holder may write the numbers.
// Everything else is immutable and safe to share between threads.
class Batch {
 public:
  // An episode that ended in the batch.
  struct Episode {
    std::int64_t worker = 0;
    std::int64_t env = 0;
    std::int64_t length = 0;  // in frames, including frames of earlier batches
    double total_reward = 0;
  };

  // Takes a slab in which every row has its header. Throws std::invalid_argument if the slab is
  // null or a header does not fit.
  explicit Batch(std::shared_ptr<Slab> slab, std::vector<Episode> episodes = {});

  // Returns the leaf with this key, [W, P, T, *frame]. A lookup costs some 100 ns: do it once per
  // batch.
  //
  // Throws std::out_of_range, which lists the existing keys, for an unknown key. get() also throws
  // std::invalid_argument if the leaf's type is not T, or if the workers of the batch are
  // concatenated along time.
  TensorView view(const Key& key) const;
  template <typename T>
  Values<T> get(const Key& key) const& {
    const TensorView found = view_of(key, dtype_of<T>);
    return Values<T>(reinterpret_cast<T*>(found.data), found.shape);
  }
  template <typename T>
  Values<T> get(const Key& key) const&& = delete;  // the memory would be freed at once

  const Layout& layout() const;
  // The extents W, P and T.
  const Geometry& geometry() const;
  // The number of collected frames, without uncollected cells.
  std::int64_t frames() const;
  // The header of each row: its worker, and the policy version at the start of its rollout.
  std::span<const RolloutHeader> headers() const;
  const RolloutHeader& header(std::int64_t row) const;
  std::span<const Episode> episodes() const;

  // The positions of the batch's trajectories, including those that continue in other batches.
  // Computed by the first call, in one pass over the flags.
  const SplitPlan& trajectories() const;

  // The owner of the memory, for tensors that share it.
  const std::shared_ptr<Slab>& lease() const;

 private:
  struct State;

  TensorView view_of(const Key& key, DType dtype) const;

  std::shared_ptr<State> state_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
