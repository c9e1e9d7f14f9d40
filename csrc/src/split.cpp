#include "pycollect/split.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "batch_rows.h"
#include "pycollect/copy.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

// Checks done, ids or mask: the shape must be that of the batch, optionally followed by ones.
void check_signal(const char* what, const ConstTensorView& view, DType dtype, const Dims& batch) {
  expect_on_host(what, view);
  bool fits = view.dtype == dtype && view.rank() >= batch.size();
  for (int i = 0; fits && i < view.rank(); ++i) {
    fits = view.shape[i] == (i < batch.size() ? batch[i] : 1);
  }
  if (!fits) {
    throw std::invalid_argument(
        std::string(what) + ": expected " + std::string(name_of(dtype)) + " of shape " +
        to_string(batch) + ", optionally followed by 1, got " + std::string(name_of(view.dtype)) +
        " of shape " + to_string(view.shape));
  }
}

// One row of done, ids or mask. Without an array, `data` is null.
struct Signal {
  const std::byte* data = nullptr;
  std::int64_t step = 0;

  explicit operator bool() const { return data != nullptr; }
  bool flag(std::int64_t t) const { return data[t * step] != std::byte{0}; }
  std::int64_t id(std::int64_t t) const {
    std::int64_t id = 0;
    std::memcpy(&id, data + t * step, sizeof(id));
    return id;
  }
};

// Calls add(start, end) for the segments of one row. Some of them may be empty.
template <typename Add>
void cut_row(const Signal& done, const Signal& ids, const Signal& mask, std::int64_t steps,
             const Add& add) {
  std::int64_t start = 0;    // start of the open segment, which is empty if start == t
  std::int64_t open_id = 0;  // id of the cell before t
  for (std::int64_t t = 0; t < steps; ++t) {
    const std::int64_t id = ids ? ids.id(t) : 0;
    const bool collected = id != -1 && (!mask || mask.flag(t));
    if (!collected || id != open_id) {
      add(start, t);
      start = collected ? t : t + 1;
    }
    open_id = id;
    if (collected && done && done.flag(t)) {
      add(start, t + 1);
      start = t + 1;
    }
  }
  add(start, steps);
}

}  // namespace

// Copies one leaf from the batch to its target.
class SplitPlan::Gather {
 public:
  Gather(const SplitPlan& plan, const ConstTensorView& source, const TensorView& target,
         bool padded, Stores stores)
      : plan_(plan),
        source_(source),
        target_(target),
        padded_(padded),
        run_(from_dimension(target, padded ? 1 : 0), from_dimension(source, plan.batch_.size() - 1),
             stores) {
    const TensorView frame = from_dimension(target, padded ? 2 : 1);
    frame_bytes_ = frame.bytes();
    dense_ = frame.is_contiguous() && target.strides[padded ? 1 : 0] == frame_bytes_;
  }

  // Bytes written per frame.
  std::int64_t frame_bytes() const { return frame_bytes_; }

  // Writes frames [begin, end) of the flat order, and the padding after each trajectory that ends
  // in this range.
  void write(std::int64_t begin, std::int64_t end) const {
    const std::vector<std::int64_t>& offsets = plan_.offsets_;
    auto i = static_cast<std::size_t>(std::upper_bound(offsets.begin(), offsets.end(), begin) -
                                      offsets.begin() - 1);
    for (; begin < end; ++i) {
      const Segment& segment = plan_.segments_[i];
      const std::int64_t skip = begin - offsets[i];
      const std::int64_t n = std::min(segment.length - skip, end - begin);
      std::byte* row =
          target_.data + (padded_ ? static_cast<std::int64_t>(i) : offsets[i]) * target_.strides[0];
      const std::int64_t step = target_.strides[padded_ ? 1 : 0];
      run_(row + skip * step,
           source_.data + row_offset(source_, plan_.batch_, segment.row) +
               (segment.start + skip) * source_.strides[plan_.batch_.size() - 1],
           n);
      if (padded_ && skip + n == segment.length) {
        pad(static_cast<std::int64_t>(i), segment.length);
      }
      begin += n;
    }
  }

 private:
  void pad(std::int64_t trajectory, std::int64_t length) const {
    const std::int64_t rest = plan_.longest_ - length;
    if (rest == 0) {
      return;
    }
    TensorView tail = target_[trajectory];
    tail.data += length * tail.strides[0];
    if (dense_) {
      std::memset(tail.data, 0, static_cast<std::size_t>(rest * frame_bytes_));
      return;
    }
    tail.shape[0] = rest;
    zero(tail);
  }

  const SplitPlan& plan_;
  ConstTensorView source_;
  TensorView target_;
  bool padded_;
  RunCopy run_;
  std::int64_t frame_bytes_ = 0;
  bool dense_ = false;
};

SplitPlan::SplitPlan(const std::optional<ConstTensorView>& done,
                     const std::optional<ConstTensorView>& ids,
                     const std::optional<ConstTensorView>& mask, int batch_dims) {
  if (!done && !ids) {
    throw std::invalid_argument("split: expected done or ids, got neither");
  }
  const ConstTensorView& given = done ? *done : *ids;
  if (batch_dims < 1 || batch_dims > given.rank()) {
    throw std::invalid_argument("batch_dims: expected 1 to " + std::to_string(given.rank()) +
                                ", the dimensions of " + (done ? "done" : "ids") + ", got " +
                                std::to_string(batch_dims));
  }
  batch_ = Dims(given.shape.from(0).first(static_cast<std::size_t>(batch_dims)));
  const int time = batch_dims - 1;
  const auto check = [&](const char* what, const std::optional<ConstTensorView>& view,
                         DType dtype) {
    if (view) {
      check_signal(what, *view, dtype, batch_);
    }
  };
  check("done", done, DType::boolean);
  check("ids", ids, DType::int64);
  check("mask", mask, DType::boolean);

  const auto signal = [&](const std::optional<ConstTensorView>& view, std::int64_t row) {
    return view ? Signal{view->data + row_offset(*view, batch_, row), view->strides[time]}
                : Signal{};
  };
  const std::int64_t steps = batch_[time];
  const std::int64_t rows = row_count(batch_);
  for (std::int64_t row = 0; row < rows && steps > 0; ++row) {
    cut_row(signal(done, row), signal(ids, row), signal(mask, row), steps,
            [&](std::int64_t start, std::int64_t end) { add(row, start, end); });
  }
}

void SplitPlan::add(std::int64_t row, std::int64_t start, std::int64_t end) {
  if (start < end) {
    segments_.push_back({row, start, end - start});
    offsets_.push_back(offsets_.back() + end - start);
    longest_ = std::max(longest_, end - start);
  }
}

std::vector<std::int64_t> SplitPlan::lengths() const {
  std::vector<std::int64_t> lengths;
  lengths.reserve(segments_.size());
  for (const Segment& segment : segments_) {
    lengths.push_back(segment.length);
  }
  return lengths;
}

void SplitPlan::padded(ThreadPool& pool, std::span<const ConstTensorView> sources,
                       std::span<const TensorView> targets) const {
  gather(pool, sources, targets, true);
}

void SplitPlan::flat(ThreadPool& pool, std::span<const ConstTensorView> sources,
                     std::span<const TensorView> targets) const {
  gather(pool, sources, targets, false);
}

void SplitPlan::gather(ThreadPool& pool, std::span<const ConstTensorView> sources,
                       std::span<const TensorView> targets, bool padded) const {
  check_leaves(sources, targets, batch_);
  const Stores stores = stores_for(total_bytes(targets));
  std::vector<Gather> leaves;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    check_target(i, targets[i],
                 joined(padded ? Dims{count(), longest_} : Dims{frames()},
                        sources[i].shape.from(batch_.size())));
    const Gather leaf(*this, sources[i], targets[i], padded, stores);
    if (leaf.frame_bytes() > 0) {
      leaves.push_back(leaf);
    }
  }
  share_out(pool, leaves, frames());
}

void SplitPlan::mask(const TensorView& target) const {
  expect_on_host("target", target);
  if (target.dtype != DType::boolean || !(target.shape == Dims{count(), longest_})) {
    throw std::invalid_argument(
        "target: expected bool of shape " + to_string(Dims{count(), longest_}) + ", got " +
        std::string(name_of(target.dtype)) + " of shape " + to_string(target.shape));
  }
  zero(target);
  constexpr std::byte yes{1};
  const ConstTensorView source(&yes, DType::boolean, Dims{1}, Dims{0}, Device{});
  const RunCopy run(from_dimension(target, 1), source);
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    run(target.data + static_cast<std::int64_t>(i) * target.strides[0], &yes, segments_[i].length);
  }
}

void SplitPlan::pad(const TensorView& target, std::int64_t value) const {
  expect_on_host("target", target);
  if (target.rank() < 2 || target.shape[0] != count() || target.shape[1] != longest_) {
    throw std::invalid_argument("target: expected a shape that begins with " +
                                to_string(Dims{count(), longest_}) + ", got " +
                                to_string(target.shape));
  }
  const TensorView tail = from_dimension(target, 1);
  ConstTensorView source = ConstTensorView::contiguous(&value, DType::int64, tail.shape);
  for (int i = 0; i < source.rank(); ++i) {
    source.strides[i] = 0;
  }
  const RunCopy run(tail, source);
  if (target.count() == 0) {  // its address may be null
    return;
  }
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const std::int64_t length = segments_[i].length;
    run(target.data + static_cast<std::int64_t>(i) * target.strides[0] + length * target.strides[1],
        source.data, longest_ - length);
  }
}

}  // namespace pycollect::inline PYCOLLECT_ABI
