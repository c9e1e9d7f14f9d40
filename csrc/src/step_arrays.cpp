#include "pycollect/detail/step_arrays.h"

#include <cstddef>
#include <cstring>

namespace pycollect::inline PYCOLLECT_ABI::detail {

StepArrays::StepArrays(std::int64_t envs, const std::vector<Leaf>& leaves) {
  for (const Leaf& leaf : leaves) {
    Dims shape{envs};
    for (const std::int64_t extent : leaf.shape) {
      shape.push_back(extent);
    }
    TensorView view = TensorView::contiguous(nullptr, leaf.dtype, shape);
    memory_.push_back(Memory::allocate(view.bytes()));
    view.data = memory_.back()->data();
    std::memset(view.data, 0, static_cast<std::size_t>(view.bytes()));
    views_.push_back(view);
  }
}

}  // namespace pycollect::inline PYCOLLECT_ABI::detail
