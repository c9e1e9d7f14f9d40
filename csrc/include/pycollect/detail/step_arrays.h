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

// One array [P, *shape] per leaf, in the order of the leaves. The arrays are contiguous, in
// separate memory, and initially zero. Views are valid as long as this object exists, also after it
// was moved.
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
