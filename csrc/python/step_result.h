// What an environment's step returns.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace pycollect::python {

namespace py = pybind11;

// Its values: an observation, a reward, two flags, and beside them an info where `expected` is 5.
// Throws std::invalid_argument where they are not as many, py::type_error where it has none.
py::tuple step_result(const py::object& returned, std::size_t expected);

}  // namespace pycollect::python
