#include "dlpack.h"

#include <utility>
#include <vector>

namespace pycollect::python::dlpack {

// Looks up each type once, as DLPack allows. The types are kept alive so that no other type can get
// the same address. Guarded by the GIL.
Offer offer_of(PyTypeObject* type) {
  static std::vector<std::pair<PyTypeObject*, Offer>> known;
  for (const auto& [other, offer] : known) {
    if (other == type) {
      return offer;
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
  const Offer offer{api, pybind11::hasattr(handle, "__dlpack__")};
  known.emplace_back(type, offer);
  return offer;
}

}  // namespace pycollect::python::dlpack
