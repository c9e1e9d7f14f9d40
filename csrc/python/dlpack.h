// How Python's arrays hand out DLPack tensors: the table of C functions of a type.
#pragma once

#include <pybind11/pybind11.h>

#include "pycollect/dlpack.h"

namespace pycollect::python::dlpack {

using namespace pycollect::dlpack;

// The table behind type(tensor).__dlpack_c_exchange_api__, capsule "dlpack_exchange_api".
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* allocate;
  int (*managed_from_object)(void* object, ManagedVersioned** out);
  int (*object_from_managed)(ManagedVersioned* tensor, void** object);
  int (*view_of_object)(void* object, Tensor* out);
  void* current_stream;
};

// The table of a type, or null where it has none of this version.
const ExchangeApi* exchange_api(PyTypeObject* type);

// Whether objects of that type have __dlpack__, which makes a capsule.
bool has_capsules(PyTypeObject* type);

}  // namespace pycollect::python::dlpack
