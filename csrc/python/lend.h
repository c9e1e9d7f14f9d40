// Slabs, seen by Python as tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "pycollect/slab.h"

namespace pycollect::python {

namespace py = pybind11;

// One tensor per leaf over a slab, of shape [*batch_shape, *frame]. Each holds the slab. The type
// is torch.Tensor, passed in because the core does not import torch.
py::tuple lend_tensors(const std::shared_ptr<Slab>& slab, const Dims& batch_shape,
                       py::handle tensor_type);

}  // namespace pycollect::python
