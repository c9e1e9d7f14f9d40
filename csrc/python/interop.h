// Names, keys and references that cross the border to Python. Arrays: see borrow.h and lend.h.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pycollect/layout.h"

namespace pycollect::python {

namespace py = pybind11;

// A reference that may be dropped on any thread, with or without the GIL; what is left when Python
// ends goes with the process.
std::shared_ptr<PyObject> kept(py::object object);

// Tuples of names and keys; throw TypeError for anything else.
Key key_from(py::handle object);
py::tuple key_to_python(const Key& key);

// Of a key, a dtype's name and a shape; throws as these do.
Leaf leaf_from(py::handle key, const std::string& dtype, const std::vector<std::int64_t>& shape);

}  // namespace pycollect::python
