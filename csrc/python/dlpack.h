// The part of DLPack's C ABI (version 1.x, https://dmlc.github.io/dlpack) that crosses this
// module's border, written out so that nothing has to be fetched to build.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "pycollect/dtype.h"

namespace pycollect::python::dlpack {

struct Device {
  std::int32_t type;
  std::int32_t id;
};
struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: contiguous
  std::uint64_t byte_offset;
};
struct Managed {  // capsule "dltensor"
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};
struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};
struct ManagedVersioned {  // capsule "dltensor_versioned"
  Version version;
  void* context;
  void (*deleter)(ManagedVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};
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

inline constexpr std::uint64_t kIsCopied = 2;
inline constexpr std::int32_t kCpu = 1;
inline constexpr std::int32_t kCuda = 2;
inline constexpr std::int32_t kCudaHost = 3;

// The table of a type, or null where it has none of this version.
const ExchangeApi* exchange_api(PyTypeObject* type);

DataType type_of(DType dtype);

}  // namespace pycollect::python::dlpack
