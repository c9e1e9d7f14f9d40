// Arrays of Python <-> TensorView: the only file that knows what Python arrays look like.
//
// A borrowed view is valid while its Python object lives and is not resized: callers keep the
// object (an argument of the bound function) for the length of the call.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "pycollect/layout.h"
#include "pycollect/slab.h"
#include "pycollect/tensor_view.h"

namespace pycollect::python {

namespace py = pybind11;

// Room for a Python number that was turned into a view of rank 0.
struct ScalarRoom {
  alignas(16) std::byte bytes[16];
};

// A view of a numpy array, a torch tensor (DLPack), anything else with the buffer protocol or
// __dlpack__, or, if room is given, of a Python or numpy number that is put there. Throws
// TypeError that names `what`. With `writable`, a read-only array is a ValueError.
TensorView borrow(py::handle object, const char* what, ScalarRoom* room = nullptr,
                  bool writable = false);

// Views of several, in their order.
std::vector<TensorView> borrow_all(const std::vector<py::object>& objects, const char* what,
                                   bool writable);

// A reference that may be dropped on any thread, with or without the GIL; what is left when Python
// ends goes with the process.
std::shared_ptr<PyObject> kept(py::object object);

// Tuples of names and keys; throw TypeError for anything else.
Key key_from(py::handle object);
py::tuple key_to_python(const Key& key);

// One tensor per leaf over a slab, of shape [*batch_shape, *frame]. Each holds the slab. The type
// is torch.Tensor, passed in because the core does not import torch.
py::tuple lend_tensors(const std::shared_ptr<Slab>& slab, const Dims& batch_shape,
                       py::handle tensor_type);

}  // namespace pycollect::python
