#include "dlpack.h"

#include <vector>

namespace pycollect::python::dlpack {
namespace {

constexpr std::uint8_t kSigned = 0, kUnsigned = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6;

}  // namespace

DataType type_of(DType dtype) {
  const auto bits = static_cast<std::uint8_t>(item_size(dtype) * 8);
  switch (kind_of(dtype)) {
    case DTypeKind::boolean:
      return {kBool, bits, 1};
    case DTypeKind::floating:
      return {dtype == DType::bfloat16 ? kBfloat : kFloat, bits, 1};
    case DTypeKind::complex:
      return {kComplex, bits, 1};
    case DTypeKind::integer:
      break;
  }
  return {name_of(dtype).front() == 'u' ? kUnsigned : kSigned, bits, 1};
}

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
