// StepArrays: memory for the arrays of one step.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pycollect/layout.h"
#include "pycollect/slab.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI::detail {

// An array [P, *shape] per leaf, in the leaves' order: zeros at first, contiguous, each with memory
// of its own. A view of one is valid while this is there, also after it was moved.
class StepArrays {
 public:
  StepArrays(std::int64_t envs, const std::vector<Leaf>& leaves);

  std::span<const TensorView> views() const { return views_; }
  const TensorView& operator[](std::size_t i) const { return views_[i]; }

 private:
  std::vector<std::shared_ptr<Memory>> memory_;
  std::vector<TensorView> views_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI::detail
