#include "lend.h"

#include <array>
#include <stdexcept>
#include <string>

#include "dlpack.h"

namespace pycollect::python {
namespace {

// What keeps a lent tensor's slab alive. Freed by the deleter, on any thread, without the GIL.
template <typename ManagedType>
struct Lent {
  ManagedType managed{};
  std::shared_ptr<Slab> slab;
  std::array<std::int64_t, Dims::kMaxRank> shape{};
  std::array<std::int64_t, Dims::kMaxRank> strides{};
};

template <typename ManagedType>
ManagedType* lend(const std::shared_ptr<Slab>& slab, std::size_t index, const Dims& batch_shape) {
  const Placement& placement = slab->placement();
  const Leaf& leaf = placement.layout()[index];
  Dims shape = batch_shape;
  for (std::int64_t extent : leaf.shape) {
    shape.push_back(extent);
  }
  const auto view =
      TensorView::contiguous(slab->data() + placement.offset(index), leaf.dtype, shape);
  auto* lent = new Lent<ManagedType>;
  lent->slab = slab;
  for (int i = 0; i < view.rank(); ++i) {
    lent->shape[static_cast<std::size_t>(i)] = view.shape[i];
    lent->strides[static_cast<std::size_t>(i)] =
        view.strides[i] / static_cast<std::int64_t>(item_size(leaf.dtype));
  }
  lent->managed.tensor = {view.data,
                          {dlpack::kCpu, 0},
                          view.rank(),
                          dlpack::type_of(leaf.dtype),
                          lent->shape.data(),
                          lent->strides.data(),
                          0};
  lent->managed.context = lent;
  lent->managed.deleter = [](ManagedType* managed) {
    delete static_cast<Lent<ManagedType>*>(managed->context);
  };
  return &lent->managed;
}

py::object lend_by_api(const dlpack::ExchangeApi& api, const std::shared_ptr<Slab>& slab,
                       std::size_t leaf, const Dims& batch_shape) {
  auto* managed = lend<dlpack::ManagedVersioned>(slab, leaf, batch_shape);
  managed->version = {1, 0};
  void* tensor = nullptr;
  if (api.object_from_managed(managed, &tensor) != 0) {
    managed->deleter(managed);
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(tensor));
}

py::object lend_by_capsule(const std::shared_ptr<Slab>& slab, std::size_t leaf,
                           const Dims& batch_shape) {
  auto* managed = lend<dlpack::Managed>(slab, leaf, batch_shape);
  PyObject* capsule = PyCapsule_New(managed, "dltensor", [](PyObject* object) {
    // A consumer renames the capsule and takes the tensor over; else it is still ours to free.
    if (PyCapsule_IsValid(object, "dltensor") != 0) {
      auto* unused = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(object, "dltensor"));
      unused->deleter(unused);
    }
  });
  if (capsule == nullptr) {
    managed->deleter(managed);
    throw py::error_already_set();
  }
  return py::module_::import("torch.utils.dlpack")
      .attr("from_dlpack")(py::reinterpret_steal<py::object>(capsule));
}

}  // namespace

py::tuple lend_tensors(const std::shared_ptr<Slab>& slab, const Dims& batch_shape,
                       py::handle tensor_type) {
  const Geometry& geometry = slab->placement().geometry();
  if (element_count({batch_shape.begin(), batch_shape.end()}) != geometry.frames()) {
    throw std::invalid_argument("batch_shape: expected " + std::to_string(geometry.frames()) +
                                " frames, got " + to_string(batch_shape));
  }
  const auto* api = dlpack::exchange_api(reinterpret_cast<PyTypeObject*>(tensor_type.ptr()));
  py::tuple tensors(slab->placement().layout().size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i] = api != nullptr ? lend_by_api(*api, slab, i, batch_shape)
                                : lend_by_capsule(slab, i, batch_shape);
  }
  return tensors;
}

}  // namespace pycollect::python
