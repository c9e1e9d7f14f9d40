// What Python passes, seen as TensorViews: arrays, tensors and numbers.
//
// A borrowed view is valid while its Python object lives and is not resized: callers keep the
// object (an argument of the bound function) for the length of the call.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <optional>
#include <vector>

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

// borrow() for an argument that comes again and again: where its type and form are those of the
// array before, only the address is new.
class Borrower {
 public:
  const TensorView& operator()(py::handle object, const char* what);
  // True if it is a numpy array that differs from the one before in the address alone.
  bool is_like_array(py::handle object);

 private:
  bool is_like_tensor(py::handle object, const char* what);

  TensorView view_;
  ScalarRoom room_;
  py::object dtype_;   // of the numpy array before
  py::object tensor_;  // or the DLPack tensor before
};

// A new numpy array of these values; TypeError that names `what` where numpy has no such dtype.
py::object copied_to_numpy(const ConstTensorView& view, const char* what);

// The numpy array of a list or tuple; other objects unchanged.
py::object sequence_as_array(py::handle object);

// A number's value, where it takes no view to read: Python's own, and numpy's bools.
std::optional<double> plain_number(py::handle object);
std::optional<bool> plain_flag(py::handle object);

// Views of several, in their order.
std::vector<ConstTensorView> borrow_sources(const std::vector<py::object>& objects,
                                            const char* what);
std::vector<TensorView> borrow_targets(const std::vector<py::object>& objects, const char* what);

}  // namespace pycollect::python
