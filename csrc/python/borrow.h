// TensorViews of Python arguments: arrays, tensors and numbers.
//
// A borrowed view is valid while its Python object is alive and not resized. Callers keep the
// object (an argument of the bound function) during the call.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "pycollect/tensor_view.h"

namespace pycollect::python {

namespace py = pybind11;

// Memory for a Python number that is viewed with rank 0.
struct ScalarRoom {
  alignas(16) std::byte bytes[16];
};

// Returns a view of a NumPy array, a torch tensor (DLPack), or any object with the buffer protocol
// or __dlpack__. If `room` is not null, also accepts a Python or NumPy number, which is stored
// there. Throws TypeError, which names `what`, for other objects. If `writable`, throws ValueError
// for a read-only array.
TensorView borrow(py::handle object, const char* what, ScalarRoom* room = nullptr,
                  bool writable = false);

// borrow() for a repeated argument. If type, shape and strides are the same as the last time, only
// the address is read again.
class Borrower {
 public:
  const TensorView& operator()(py::handle object, const char* what);
  // Whether this is a NumPy array that differs from the last one only in its address.
  bool is_like_array(py::handle object);

 private:
  bool is_like_tensor(py::handle object, const char* what);

  TensorView view_;
  ScalarRoom room_;
  py::object dtype_;   // of the last NumPy array
  py::object tensor_;  // the last DLPack tensor
};

// Copies the values to a new NumPy array. Throws TypeError, which names `what`, if NumPy lacks the
// dtype.
py::object copied_to_numpy(const ConstTensorView& view, const char* what);

// Converts a list or tuple to a NumPy array. Returns other objects unchanged.
py::object sequence_as_array(py::handle object);

// The value of a number that can be read without a view: a Python float, or a bool of Python or
// NumPy.
std::optional<double> plain_number(py::handle object);
std::optional<bool> plain_flag(py::handle object);

// Views of several objects, in order.
std::vector<ConstTensorView> borrow_sources(const std::vector<py::object>& objects,
                                            const char* what);
std::vector<TensorView> borrow_targets(const std::vector<py::object>& objects, const char* what);

}  // namespace pycollect::python
