#include "pycollect/dlpack.h"

#include <array>
#include <stdexcept>
#include <string>
#include <utility>

namespace pycollect::inline PYCOLLECT_ABI {

namespace dlpack {
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

}  // namespace dlpack

namespace {

// Keeps the memory of an exported tensor alive. The deleter frees it.
template <typename ManagedType>
struct Lent {
  ManagedType managed{};
  std::shared_ptr<const void> lease;
  std::array<std::int64_t, Dims::kMaxRank> shape{};
  std::array<std::int64_t, Dims::kMaxRank> strides{};
};

template <typename ManagedType>
ManagedType* lend(const std::shared_ptr<const void>& lease, const TensorView& view) {
  const auto item = static_cast<std::int64_t>(item_size(view.dtype));
  auto lent = std::make_unique<Lent<ManagedType>>();
  for (int i = 0; i < view.rank(); ++i) {
    if (view.strides[i] % item != 0) {
      throw std::invalid_argument("view: expected strides that are multiples of " +
                                  std::to_string(item) + " bytes, the element size, got " +
                                  to_string(view.strides));
    }
    lent->shape[static_cast<std::size_t>(i)] = view.shape[i];
    lent->strides[static_cast<std::size_t>(i)] = view.strides[i] / item;
  }
  lent->lease = lease;
  lent->managed.tensor = {
      view.data,
      {view.device.kind == DeviceKind::cpu ? dlpack::kCpu : dlpack::kCuda, view.device.index},
      view.rank(),
      dlpack::type_of(view.dtype),
      lent->shape.data(),
      lent->strides.data(),
      0};
  lent->managed.context = lent.get();
  lent->managed.deleter = [](ManagedType* managed) {
    delete static_cast<Lent<ManagedType>*>(managed->context);
  };
  return &lent.release()->managed;
}

}  // namespace

dlpack::Managed* to_dlpack(const std::shared_ptr<const void>& lease, const TensorView& view) {
  return lend<dlpack::Managed>(lease, view);
}

dlpack::ManagedVersioned* to_dlpack_versioned(const std::shared_ptr<const void>& lease,
                                              const TensorView& view) {
  auto* managed = lend<dlpack::ManagedVersioned>(lease, view);
  managed->version = {1, 0};
  return managed;
}

}  // namespace pycollect::inline PYCOLLECT_ABI
