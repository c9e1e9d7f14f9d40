// DLPack tensors that share memory with torch, JAX and other libraries without a copy.
//
// This header declares the required part of DLPack's C ABI (version 1.x,
// https://dmlc.github.io/dlpack), so the build needs no download. Managed is DLManagedTensor and
// ManagedVersioned is DLManagedTensorVersioned, under names that do not clash with those; convert
// with reinterpret_cast.
#pragma once

#include <cstdint>
#include <memory>

#include "pycollect/dtype.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI::dlpack {

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
  std::int64_t* strides;  // in elements; null if contiguous
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

inline constexpr std::uint64_t kIsReadOnly = 1;
inline constexpr std::uint64_t kIsCopied = 2;
inline constexpr std::int32_t kCpu = 1;
inline constexpr std::int32_t kCuda = 2;
inline constexpr std::int32_t kCudaHost = 3;

DataType type_of(DType dtype);

}  // namespace pycollect::inline PYCOLLECT_ABI::dlpack

namespace pycollect::inline PYCOLLECT_ABI {

// Returns the array of a view as a DLPack tensor that holds `lease`, the owner of the memory (a
// Slab, for example). The lease is released when the consumer calls the tensor's deleter, on any
// thread. The caller owns the result until a consumer takes it. Makes one allocation. Throws
// std::invalid_argument if strides are not multiples of the item size.
//
//     at::Tensor tensor = at::fromDLPack(
//         reinterpret_cast<DLManagedTensor*>(to_dlpack(batch.lease(), batch.view("action"))));
dlpack::Managed* to_dlpack(const std::shared_ptr<const void>& lease, const TensorView& view);

// Like to_dlpack(), for consumers that request the versioned form.
dlpack::ManagedVersioned* to_dlpack_versioned(const std::shared_ptr<const void>& lease,
                                              const TensorView& view);

}  // namespace pycollect::inline PYCOLLECT_ABI
