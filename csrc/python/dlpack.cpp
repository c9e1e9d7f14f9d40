#include "dlpack.h"

#include <vector>

namespace pycollect::python::dlpack {
// Looked up once per type, as DLPack says one may; the types are kept alive so that an address
// cannot come to mean another one. Guarded by the GIL.
const ExchangeApi* exchange_api(PyTypeObject* type) {
  struct Entry {
    PyTypeObject* type;
    const ExchangeApi* api;
  };
  static std::vector<Entry> known;
  for (const Entry& entry : known) {
    if (entry.type == type) {
      return entry.api;
    }
  }
  const ExchangeApi* api = nullptr;
  const pybind11::handle handle(reinterpret_cast<PyObject*>(type));
  if (pybind11::hasattr(handle, "__dlpack_c_exchange_api__")) {
    const pybind11::object capsule = handle.attr("__dlpack_c_exchange_api__");
    api =
        static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) {
      PyErr_Clear();
    }
    if (api != nullptr && (api->version.major != 1 || api->view_of_object == nullptr)) {
      api = nullptr;
    }
  }
  handle.inc_ref();
  known.push_back({type, api});
  return api;
}

}  // namespace pycollect::python::dlpack
