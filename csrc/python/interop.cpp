#include "interop.h"

#include <algorithm>
#include <span>

namespace pycollect::python {
namespace {

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

}  // namespace

std::shared_ptr<PyObject> kept(py::object object) {
  return {object.release().ptr(), [](PyObject* owned) {
            if (Py_IsInitialized() != 0 && !is_finalizing()) {
              const py::gil_scoped_acquire gil;
              Py_DECREF(owned);
            }
          }};
}

Key key_from(py::handle object) {
  const auto is_name = [](py::handle part) { return py::isinstance<py::str>(part); };
  if (!py::isinstance<py::tuple>(object) || !std::all_of(object.begin(), object.end(), is_name)) {
    throw py::type_error("key: expected a tuple of names, got " + std::string(py::repr(object)));
  }
  Key key;
  for (py::handle part : py::reinterpret_borrow<py::tuple>(object)) {
    key.push_back(py::cast<std::string>(part));
  }
  return key;
}

py::tuple key_to_python(const Key& key) {
  py::tuple result(key.size());
  for (std::size_t i = 0; i < key.size(); ++i) {
    result[i] = py::str(key[i]);
  }
  return result;
}

Leaf leaf_from(py::handle key, const std::string& dtype, const std::vector<std::int64_t>& shape) {
  return {key_from(key), dtype_named(dtype), Dims(std::span(shape))};
}

}  // namespace pycollect::python
