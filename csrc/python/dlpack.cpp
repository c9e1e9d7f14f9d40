#include "dlpack.h"

#include <vector>

namespace pycollect::python::dlpack {
namespace {

struct Offer {
  PyTypeObject* type;
  const ExchangeApi* api;
  bool capsules;
};

// Looked up once per type, as DLPack says one may; the types are kept alive so that an address
// cannot come to mean another one. Guarded by the GIL.
const Offer& offer_of(PyTypeObject* type) {
  static std::vector<Offer> known;
  for (const Offer& offer : known) {
    if (offer.type == type) {
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
  return known.emplace_back(Offer{type, api, pybind11::hasattr(handle, "__dlpack__")});
}

}  // namespace

const ExchangeApi* exchange_api(PyTypeObject* type) { return offer_of(type).api; }

bool has_capsules(PyTypeObject* type) { return offer_of(type).capsules; }

}  // namespace pycollect::python::dlpack
