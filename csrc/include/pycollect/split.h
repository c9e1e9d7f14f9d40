// split: where the trajectories of a batch lie, and their frames gathered one after the other.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

class ThreadPool;

// Frames that follow each other in one row of a batch: cells [start, start + length) of `row`, all
// batch dimensions but the last (time) counted as one.
struct Segment {
  std::int64_t row;
  std::int64_t start;
  std::int64_t length;  // at least 1
};

// The trajectories of one batch, in row-major order. Immutable, so safe to share.
//
// A trajectory ends at a done, where the id changes, at the row's end, and at an uncollected cell
// (id -1 or mask False). Ids are never compared across such an end, so that repeated ones cannot
// join two trajectories. Uncollected cells are dropped, and also end a trajectory whose id goes on
// after them: what is left of it then is two segments, since its frames do not follow each other.
class SplitPlan {
 public:
  // `done` is bool, `ids` int64, `mask` bool, each of the batch's shape, or with dimensions of
  // extent 1 behind it. `batch_dims` is the number of batch dimensions, at least 1. Throws
  // std::invalid_argument where neither done nor ids is given, or where one does not fit.
  SplitPlan(const std::optional<ConstTensorView>& done, const std::optional<ConstTensorView>& ids,
            const std::optional<ConstTensorView>& mask, int batch_dims);

  // The shape of the batch, time last.
  const Dims& batch() const { return batch_; }
  // N trajectories.
  std::span<const Segment> segments() const { return segments_; }
  // N + 1 positions in the flat form: trajectory i is [offsets[i], offsets[i + 1]).
  std::span<const std::int64_t> offsets() const { return offsets_; }
  std::vector<std::int64_t> lengths() const;
  std::int64_t count() const { return static_cast<std::int64_t>(segments_.size()); }
  std::int64_t longest() const { return longest_; }
  std::int64_t frames() const { return offsets_.back(); }

  // Each source [*batch, *frame] into its target, [N, longest, *frame], zeros behind each
  // trajectory's end; or [frames, *frame], all of them one after the other. Values are cast to the
  // target's type, as by copy(). Throws std::invalid_argument, before anything is written, where a
  // shape does not fit. Linear in the targets' size, shared between the threads of the pool.
  void padded(ThreadPool& pool, std::span<const ConstTensorView> sources,
              std::span<const TensorView> targets) const;
  void flat(ThreadPool& pool, std::span<const ConstTensorView> sources,
            std::span<const TensorView> targets) const;

  // Which cells of the padded form hold a frame: bool [N, longest].
  void mask(const TensorView& target) const;

  // Sets the padding of a padded leaf, [N, longest, *frame], to another value than zero.
  void pad(const TensorView& target, std::int64_t value) const;

 private:
  class Gather;

  void gather(ThreadPool& pool, std::span<const ConstTensorView> sources,
              std::span<const TensorView> targets, bool padded) const;
  // Cells [start, end) of a row are a segment, or nothing where there are none.
  void add(std::int64_t row, std::int64_t start, std::int64_t end);

  Dims batch_;
  std::vector<Segment> segments_;
  std::vector<std::int64_t> offsets_{0};
  std::int64_t longest_ = 0;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
