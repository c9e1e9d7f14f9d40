#include "pycollect/detail/step_summary.h"

#include <algorithm>

#include "pycollect/copy.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

template <typename T>
std::span<const T> numbers_of(const ConstTensorView& view, DType dtype, std::vector<T>& buffer) {
  copy(TensorView::contiguous(buffer.data(), dtype, view.shape), view);
  return buffer;
}

template <typename T>
void grow(std::vector<T>& buffer, std::int64_t size) {
  buffer.resize(std::max(buffer.size(), static_cast<std::size_t>(size)));
}

}  // namespace

StepSummary::Part StepSummary::part(std::size_t place, const LeafRows& leaf) const {
  std::int64_t count = 1;
  for (const std::int64_t extent : leaf.leaf().shape) {
    count *= extent;
  }
  return {place, count};
}

void StepSummary::add_end(std::size_t place, const LeafRows& leaf) {
  ends_.push_back(part(place, leaf));
  grow(flags_, envs_ * ends_.back().count);
}

void StepSummary::add_reward(std::size_t place, const LeafRows& leaf) {
  rewards_.push_back(part(place, leaf));
  grow(numbers_, envs_ * rewards_.back().count);
}

void StepSummary::read(std::span<const ConstTensorView> values, std::span<double> earned,
                       std::span<std::uint8_t> ended) {
  std::fill(earned.begin(), earned.end(), 0.0);
  std::fill(ended.begin(), ended.end(), std::uint8_t{0});
  for (const Part& part : ends_) {
    auto flag = numbers_of(values[part.place], DType::boolean, flags_).begin();
    for (std::uint8_t& end : ended) {
      for (std::int64_t i = 0; i < part.count; ++i) {
        end |= *flag++;
      }
    }
  }
  for (const Part& part : rewards_) {
    auto number = numbers_of(values[part.place], DType::float64, numbers_).begin();
    for (double& sum : earned) {
      for (std::int64_t i = 0; i < part.count; ++i) {
        sum += *number++;
      }
    }
  }
}

}  // namespace pycollect::inline PYCOLLECT_ABI
