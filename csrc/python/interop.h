// Conversion of names, keys and references between Python and C++. For arrays, see borrow.h and
// lend.h.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pycollect/layout.h"

namespace pycollect::python {

namespace py = pybind11;

// A reference that any thread may release, with or without the GIL. References that remain when
// Python finalizes are leaked.
std::shared_ptr<PyObject> kept(py::object object);

// Converts a key from and to a tuple of names. Throws TypeError for other objects.
Key key_from(py::handle object);
py::tuple key_to_python(const Key& key);

// Makes a leaf of a key, a dtype name and a shape. Throws as their conversions do.
Leaf leaf_from(py::handle key, const std::string& dtype, const std::vector<std::int64_t>& shape);

}  // namespace pycollect::python
