// The return value of an environment's step().
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace pycollect::python {

namespace py = pybind11;

// Returns the values as a tuple: an observation, a reward, two flags and, if `expected` is 5, an
// info. Throws std::invalid_argument if their number differs, and py::type_error if the object is
// not a sequence.
py::tuple step_result(const py::object& returned, std::size_t expected);

}  // namespace pycollect::python
