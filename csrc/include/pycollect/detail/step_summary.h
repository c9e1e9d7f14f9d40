// StepSummary: reward and end of a step, computed from rewards and flags of any keys and shapes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pycollect/detail/leaf_rows.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// An environment's episode ends if any of its flags is set. Its reward is the sum of its rewards.
class StepSummary {
 public:
  explicit StepSummary(std::int64_t envs) : envs_(envs) {}

  // The step's array at this position is a flag or a reward with this leaf.
  void add_end(std::size_t place, const LeafRows& leaf);
  void add_reward(std::size_t place, const LeafRows& leaf);
  bool has_ends() const { return !ends_.empty(); }
  bool has_rewards() const { return !rewards_.empty(); }

  // Reads the arrays of a step, [P, *frame] or [*frame], in the shapes of their leaves. Allocates
  // nothing.
  void read(std::span<const ConstTensorView> values, std::span<double> earned,
            std::span<std::uint8_t> ended);

 private:
  struct Part {
    std::size_t place;
    std::int64_t count;  // numbers per environment
  };
  Part part(std::size_t place, const LeafRows& leaf) const;

  std::int64_t envs_;
  std::vector<Part> ends_, rewards_;
  std::vector<std::uint8_t> flags_;  // one step of the largest flag
  std::vector<double> numbers_;      // one step of the largest reward
};

}  // namespace pycollect::inline PYCOLLECT_ABI
