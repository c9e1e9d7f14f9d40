#include "lend.h"

#include <stdexcept>
#include <string>

#include "dlpack.h"

namespace pycollect::python {
namespace {

// A view of a leaf, with the shape of the batch's tensors.
TensorView view_of(const Slab& slab, std::size_t index, const Dims& batch_shape) {
  const Placement& placement = slab.placement();
  const Leaf& leaf = placement.layout()[index];
  Dims shape = batch_shape;
  for (std::int64_t extent : leaf.shape) {
    shape.push_back(extent);
  }
  return TensorView::contiguous(slab.data() + placement.offset(index), leaf.dtype, shape);
}

py::object lend_by_api(const dlpack::ExchangeApi& api, const std::shared_ptr<Slab>& slab,
                       std::size_t leaf, const Dims& batch_shape) {
  auto* managed = to_dlpack_versioned(slab, view_of(*slab, leaf, batch_shape));
  void* tensor = nullptr;
  if (api.object_from_managed(managed, &tensor) != 0) {
    managed->deleter(managed);
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(tensor));
}

py::object lend_by_capsule(const std::shared_ptr<Slab>& slab, std::size_t leaf,
                           const Dims& batch_shape) {
  auto* managed = to_dlpack(slab, view_of(*slab, leaf, batch_shape));
  PyObject* capsule = PyCapsule_New(managed, "dltensor", [](PyObject* object) {
    // A consumer renames the capsule and takes ownership of the tensor; otherwise, free it here.
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
  const auto* api = dlpack::offer_of(reinterpret_cast<PyTypeObject*>(tensor_type.ptr())).api;
  py::tuple tensors(slab->placement().layout().size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i] = api != nullptr ? lend_by_api(*api, slab, i, batch_shape)
                                : lend_by_capsule(slab, i, batch_shape);
  }
  return tensors;
}

}  // namespace pycollect::python
