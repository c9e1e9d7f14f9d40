// Python tensors over slabs.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "pycollect/slab.h"

namespace pycollect::python {

namespace py = pybind11;

// Returns one tensor per leaf of the slab, of shape [*batch_shape, *frame]. Each tensor keeps the
// slab alive. `tensor_type` is torch.Tensor; it is an argument because the core does not import
// torch.
py::tuple lend_tensors(const std::shared_ptr<Slab>& slab, const Dims& batch_shape,
                       py::handle tensor_type);

}  // namespace pycollect::python
