// Splitting a batch into trajectories, padded or concatenated.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

class ThreadPool;

// Consecutive frames in one row of a batch: cells [start, start + length) of `row`. Rows number all
// batch dimensions but the last (time) as one.
struct Segment {
  std::int64_t row;
  std::int64_t start;
  std::int64_t length;  // at least 1
};

// The trajectories of one batch, in row-major order. Immutable, so safe to share.
//
// A trajectory ends at a done flag, where the id changes, at the end of its row, and at an
// uncollected cell (id -1 or mask False). Ids are never compared across such an end, so repeated
// ids do not join two trajectories. Uncollected cells are dropped. If a trajectory continues after
// uncollected cells, it becomes two segments, because its frames are not consecutive.
class SplitPlan {
 public:
  // `done` is bool, `ids` int64 and `mask` bool, each of the batch's shape, possibly followed by
  // dimensions of extent 1. `batch_dims` is the number of batch dimensions, at least 1. Throws
  // std::invalid_argument if both done and ids are missing, or if an array does not fit.
  SplitPlan(const std::optional<ConstTensorView>& done, const std::optional<ConstTensorView>& ids,
            const std::optional<ConstTensorView>& mask, int batch_dims);

  // The shape of the batch, time last.
  const Dims& batch() const { return batch_; }
  // The N trajectories.
  std::span<const Segment> segments() const { return segments_; }
  // N + 1 positions in the flat form: trajectory i is [offsets[i], offsets[i + 1]).
  std::span<const std::int64_t> offsets() const { return offsets_; }
  std::vector<std::int64_t> lengths() const;
  std::int64_t count() const { return static_cast<std::int64_t>(segments_.size()); }
  std::int64_t longest() const { return longest_; }
  std::int64_t frames() const { return offsets_.back(); }

  // Copy each source [*batch, *frame] into its target. padded() writes [N, longest, *frame], with
  // zeros after the end of each trajectory. flat() writes [frames, *frame], one trajectory after
  // another. Values are cast to the target's type, as by copy(). The cost is linear in the size of
  // the targets; the threads of the pool share the work. Throw std::invalid_argument, before
  // anything is written, if a shape does not fit.
  void padded(ThreadPool& pool, std::span<const ConstTensorView> sources,
              std::span<const TensorView> targets) const;
  void flat(ThreadPool& pool, std::span<const ConstTensorView> sources,
            std::span<const TensorView> targets) const;

  // Writes which cells of the padded form hold a frame: bool [N, longest].
  void mask(const TensorView& target) const;

  // Fills the padding of a padded leaf, [N, longest, *frame], with a value other than zero.
  void pad(const TensorView& target, std::int64_t value) const;

 private:
  class Gather;

  void gather(ThreadPool& pool, std::span<const ConstTensorView> sources,
              std::span<const TensorView> targets, bool padded) const;
  // Adds the segment [start, end) of a row, unless it is empty.
  void add(std::int64_t row, std::int64_t start, std::int64_t end);

  Dims batch_;
  std::vector<Segment> segments_;
  std::vector<std::int64_t> offsets_{0};
  std::int64_t longest_ = 0;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
