// DLPack exchange with Python arrays: the C function table of a type.
#pragma once

#include <pybind11/pybind11.h>

#include "pycollect/dlpack.h"

namespace pycollect::python::dlpack {

using namespace pycollect::dlpack;

// The table at type(tensor).__dlpack_c_exchange_api__, in a capsule named "dlpack_exchange_api".
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* allocate;
  int (*managed_from_object)(void* object, ManagedVersioned** out);
  int (*object_from_managed)(ManagedVersioned* tensor, void** object);
  int (*view_of_object)(void* object, Tensor* out);
  void* current_stream;
};

// The ways in which a type exports tensors: the table, or null if it has none of this version, and
// whether it has __dlpack__, which makes capsules.
struct Offer {
  const ExchangeApi* api;
  bool capsules;
};
Offer offer_of(PyTypeObject* type);

}  // namespace pycollect::python::dlpack
