// Helpers of split and multistep: batches as rows of cells, checks of leaves, and work sharing. Not
// part of the public headers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "pycollect/detail/checked.h"
#include "pycollect/tensor_view.h"
#include "pycollect/thread_pool.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Offset of a row in bytes. `row` counts all batch dimensions except the last as one.
template <typename View>
std::int64_t row_offset(const View& view, const Dims& batch, std::int64_t row) {
  std::int64_t offset = 0;
  for (int i = batch.size() - 2; i >= 0; --i) {
    offset += row % batch[i] * view.strides[i];
    row /= batch[i];
  }
  return offset;
}

inline std::int64_t row_count(const Dims& batch) {
  return element_count(batch.from(0).first(static_cast<std::size_t>(batch.size() - 1)));
}

// The view without the dimensions before `first`.
template <typename View>
View from_dimension(const View& view, int first) {
  return {view.data, view.dtype, Dims(view.shape.from(first)), Dims(view.strides.from(first)),
          view.device};
}

template <typename View>
void expect_on_host(const char* what, const View& view) {
  if (view.device.kind != DeviceKind::cpu) {
    throw std::invalid_argument(std::string(what) +
                                ": expected an array in host memory, got one on a device");
  }
}

// Checks that there are equally many sources and targets, and that the shape of every source begins
// with the batch's shape.
inline void check_batch(std::span<const ConstTensorView> sources,
                        std::span<const TensorView> targets, const Dims& batch) {
  if (sources.size() != targets.size()) {
    throw std::invalid_argument("targets: expected " + std::to_string(sources.size()) + ", got " +
                                std::to_string(targets.size()));
  }
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (sources[i].rank() < batch.size() ||
        !std::equal(batch.begin(), batch.end(), sources[i].shape.begin())) {
      throw std::invalid_argument("source " + std::to_string(i) +
                                  ": expected a shape that begins with " + to_string(batch) +
                                  ", got " + to_string(sources[i].shape));
    }
  }
}

// As check_batch(), and checks that all arrays are in host memory.
inline void check_leaves(std::span<const ConstTensorView> sources,
                         std::span<const TensorView> targets, const Dims& batch) {
  check_batch(sources, targets, batch);
  for (std::size_t i = 0; i < sources.size(); ++i) {
    expect_on_host("source", sources[i]);
    expect_on_host("target", targets[i]);
  }
}

inline std::int64_t total_bytes(std::span<const TensorView> views) {
  std::int64_t bytes = 0;
  for (const TensorView& view : views) {
    bytes = checked_add(bytes, view.bytes());
  }
  return bytes;
}

// The dimensions of the batch, followed by those of a frame.
inline Dims joined(const Dims& lead, std::span<const std::int64_t> frame) {
  Dims shape = lead;
  for (std::int64_t extent : frame) {
    shape.push_back(extent);
  }
  return shape;
}

inline void check_target(std::size_t i, const TensorView& target, const Dims& expected) {
  if (!(target.shape == expected)) {
    throw std::invalid_argument("target " + std::to_string(i) + ": expected shape " +
                                to_string(expected) + ", got " + to_string(target.shape));
  }
}

// Distributes the work on several leaves of `frames` frames each over the threads of the pool, in
// pieces of about equal size. Calls leaf.write(begin, end) for ranges that together cover all
// frames of each leaf. A leaf has a positive frame_bytes().
template <typename Leaf>
void share_out(ThreadPool& pool, const std::vector<Leaf>& leaves, std::int64_t frames) {
  // Leaf i is responsible for bytes [ends[i], ends[i + 1]).
  std::vector<std::int64_t> ends{0};
  for (const Leaf& leaf : leaves) {
    ends.push_back(checked_add(ends.back(), checked_mul(frames, leaf.frame_bytes())));
  }
  const auto work = [&](std::int64_t begin, std::int64_t end) {
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      // A frame belongs to the piece that contains its first byte.
      const std::int64_t bytes = leaves[i].frame_bytes();
      const auto first = [&](std::int64_t byte) {
        return (std::clamp(byte, ends[i], ends[i + 1]) - ends[i] + bytes - 1) / bytes;
      };
      if (const std::int64_t from = first(begin), to = first(end); from < to) {
        leaves[i].write(from, to);
      }
    }
  };
  // Below this size, one thread does all the work, which takes about 200 us.
  constexpr std::int64_t kAlone = std::int64_t{1} << 20;
  constexpr std::int64_t kGrain = std::int64_t{256} << 10;
  if (ends.back() < kAlone) {
    work(0, ends.back());
  } else {
    pool.parallel_for(ends.back(), kGrain, work);
  }
}

}  // namespace pycollect::inline PYCOLLECT_ABI
