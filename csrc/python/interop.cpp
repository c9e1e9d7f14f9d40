#include "interop.h"

#include <pybind11/numpy.h>

#include <array>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <vector>

#include "dlpack.h"

namespace pycollect::python {
namespace {

// numpy's type numbers, which are part of its ABI. On Linux `long` is 64 bits wide.
std::optional<DType> dtype_of_numpy(int type_num) {
  switch (type_num) {
    case 0:
      return DType::boolean;
    case 1:
      return DType::int8;
    case 2:
      return DType::uint8;
    case 3:
      return DType::int16;
    case 4:
      return DType::uint16;
    case 5:
      return DType::int32;
    case 6:
      return DType::uint32;
    case 7:
    case 9:
      return DType::int64;
    case 8:
    case 10:
      return DType::uint64;
    case 11:
      return DType::float32;
    case 12:
      return DType::float64;
    case 14:
      return DType::complex64;
    case 15:
      return DType::complex128;
    case 23:
      return DType::float16;
    default:
      return std::nullopt;
  }
}

constexpr std::uint8_t kSigned = 0, kUnsigned = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6;

dlpack::DataType dlpack_type(DType dtype) {
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

DType dtype_of_dlpack(const dlpack::DataType& type, const char* what) {
  for (int i = 0; i <= static_cast<int>(DType::complex128); ++i) {
    const dlpack::DataType known = dlpack_type(static_cast<DType>(i));
    if (known.code == type.code && known.bits == type.bits && type.lanes == 1) {
      return static_cast<DType>(i);
    }
  }
  throw py::type_error(std::string(what) + ": expected a numeric dtype, got DLPack's code " +
                       std::to_string(type.code) + " with " + std::to_string(type.bits) + " bits");
}

[[noreturn]] void refuse(py::handle object, const char* what) {
  throw py::type_error(std::string(what) + ": expected a numeric array or tensor, got " +
                       std::string(py::str(py::type::of(object).attr("__name__"))));
}

TensorView view_of_numpy(const py::array& array, const char* what, bool writable) {
  const auto* proxy = py::detail::array_proxy(array.ptr());
  const auto dtype = dtype_of_numpy(array.dtype().num());
  if (!dtype || array.dtype().byteorder() == '>') {
    throw py::type_error(std::string(what) + ": expected a numeric dtype, got " +
                         std::string(py::str(array.dtype())));
  }
  if (writable && !array.writeable()) {
    throw py::value_error(std::string(what) + ": expected a writable array, got a read-only one");
  }
  TensorView view;
  view.data = reinterpret_cast<std::byte*>(proxy->data);
  view.dtype = *dtype;
  for (int i = 0; i < proxy->nd; ++i) {
    view.shape.push_back(proxy->dimensions[i]);
    view.strides.push_back(proxy->strides[i]);
  }
  return view;
}

TensorView view_of_dlpack(const dlpack::Tensor& tensor, const char* what) {
  const DType dtype = dtype_of_dlpack(tensor.dtype, what);
  Dims shape(std::span<const std::int64_t>(tensor.shape, static_cast<std::size_t>(tensor.ndim)));
  TensorView view = TensorView::contiguous(
      static_cast<std::byte*>(tensor.data) + tensor.byte_offset, dtype, shape);
  if (tensor.strides != nullptr) {
    for (int i = 0; i < tensor.ndim; ++i) {
      view.strides[i] = tensor.strides[i] * static_cast<std::int64_t>(item_size(dtype));
    }
  }
  if (tensor.device.type == dlpack::kCuda) {
    view.device = {DeviceKind::cuda, tensor.device.id};
  } else if (tensor.device.type != dlpack::kCpu && tensor.device.type != dlpack::kCudaHost) {
    throw py::value_error(std::string(what) + ": expected memory of the CPU or of CUDA, got " +
                          "DLPack's device type " + std::to_string(tensor.device.type));
  }
  return view;
}

// The exchange table of a type, or null. Looked up once per type, as DLPack says one may; the
// types are kept alive so that an address cannot come to mean another one. Guarded by the GIL.
const dlpack::ExchangeApi* exchange_api(PyTypeObject* type) {
  struct Entry {
    PyTypeObject* type;
    const dlpack::ExchangeApi* api;
  };
  static std::vector<Entry> known;
  for (const Entry& entry : known) {
    if (entry.type == type) {
      return entry.api;
    }
  }
  const dlpack::ExchangeApi* api = nullptr;
  const py::handle handle(reinterpret_cast<PyObject*>(type));
  if (py::hasattr(handle, "__dlpack_c_exchange_api__")) {
    const py::object capsule = handle.attr("__dlpack_c_exchange_api__");
    api = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
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

TensorView view_of_capsule(py::handle object, const char* what) {
  const py::object capsule = object.attr("__dlpack__")();
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor") != 0) {
    return view_of_dlpack(
        static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"))->tensor,
        what);
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    const auto* managed = static_cast<dlpack::ManagedVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if ((managed->flags & dlpack::kIsCopied) == 0) {  // a copy would die with the capsule
      return view_of_dlpack(managed->tensor, what);
    }
  }
  refuse(object, what);
}

// torch negates and conjugates lazily: a bit says so, and the memory holds the other value.
// DLPack's table does not look at the bit, so a tensor that has it would be read wrong.
void refuse_lazy(py::handle tensor, DType dtype, const char* what) {
  const bool complex = kind_of(dtype) == DTypeKind::complex;
  if (!complex && kind_of(dtype) != DTypeKind::floating) {
    return;
  }
  static PyObject* const names[] = {PyUnicode_InternFromString("is_neg"),
                                    PyUnicode_InternFromString("is_conj")};
  for (int i = 0; i <= static_cast<int>(complex); ++i) {
    const auto answer =
        py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), names[i]));
    if (!answer) {
      PyErr_Clear();  // another library's tensor, which has no such bit
    } else if (answer.ptr() == Py_True) {
      throw py::value_error(std::string(what) + ": expected a tensor in its own memory, got one " +
                            "with a lazy negation or conjugation; call " +
                            "resolve_neg() or resolve_conj() on it");
    }
  }
}

template <typename T>
TensorView put(ScalarRoom& room, DType dtype, T value) {
  std::memcpy(room.bytes, &value, sizeof(value));
  return TensorView::contiguous(room.bytes, dtype, Dims{});
}

// Python's and numpy's numbers: bool, then whole numbers (__index__), then what has __float__.
std::optional<TensorView> view_of_number(py::handle object, ScalarRoom& room) {
  PyObject* number = object.ptr();
  if (PyFloat_Check(number)) {
    return put(room, DType::float64, PyFloat_AS_DOUBLE(number));
  }
  if (PyBool_Check(number)) {
    return put(room, DType::boolean, static_cast<std::uint8_t>(number == Py_True));
  }
  if (PyIndex_Check(number)) {
    const py::object index = py::reinterpret_steal<py::object>(PyNumber_Index(number));
    if (!index) {
      throw py::error_already_set();
    }
    const long long value = PyLong_AsLongLong(index.ptr());
    if (value == -1 && PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    return put(room, DType::int64, static_cast<std::int64_t>(value));
  }
  const auto* methods = Py_TYPE(number)->tp_as_number;
  if (methods == nullptr || methods->nb_float == nullptr) {
    return std::nullopt;
  }
  if (py::hasattr(object, "dtype") &&
      object.attr("dtype").attr("kind").cast<std::string>() == "b") {
    return put(room, DType::boolean, static_cast<std::uint8_t>(PyObject_IsTrue(number)));
  }
  const double value = PyFloat_AsDouble(number);
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return put(room, DType::float64, value);
}

}  // namespace

TensorView borrow(py::handle object, const char* what, ScalarRoom* room, bool writable) {
  if (py::isinstance<py::array>(object)) {
    return view_of_numpy(py::reinterpret_borrow<py::array>(object), what, writable);
  }
  if (const dlpack::ExchangeApi* api = exchange_api(Py_TYPE(object.ptr()))) {
    dlpack::Tensor tensor;
    if (api->view_of_object(object.ptr(), &tensor) != 0) {
      throw py::error_already_set();
    }
    const TensorView view = view_of_dlpack(tensor, what);
    refuse_lazy(object, view.dtype, what);
    return view;
  }
  if (room != nullptr) {
    if (const auto number = view_of_number(object, *room)) {
      return *number;
    }
  }
  if (py::hasattr(object, "__dlpack__")) {
    return view_of_capsule(object, what);
  }
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    // numpy reads the format string; the view outlives this array because the object lives on.
    return view_of_numpy(py::array::ensure(object), what, writable);
  }
  refuse(object, what);
}

std::vector<TensorView> borrow_all(const std::vector<py::object>& objects, const char* what,
                                   bool writable) {
  std::vector<TensorView> views;
  views.reserve(objects.size());
  for (const py::object& object : objects) {
    views.push_back(borrow(object, what, nullptr, writable));
  }
  return views;
}

namespace {

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

}  // namespace

std::shared_ptr<PyObject> kept(py::object object) {
  return {object.release().ptr(), [](PyObject* owned) {
            if (Py_IsInitialized() != 0 && !is_finalizing()) {
              const py::gil_scoped_acquire gil;
              Py_DECREF(owned);
            }
          }};
}

Key key_from(py::handle object) {
  if (!py::isinstance<py::tuple>(object)) {
    throw py::type_error("key: expected a tuple of names, got " + std::string(py::repr(object)));
  }
  Key key;
  for (py::handle part : py::reinterpret_borrow<py::tuple>(object)) {
    key.push_back(py::cast<std::string>(part));
  }
  return key;
}

py::tuple key_to_python(const Key& key) {
  py::tuple result(key.size());
  for (std::size_t i = 0; i < key.size(); ++i) {
    result[i] = py::str(key[i]);
  }
  return result;
}

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
                          dlpack_type(leaf.dtype),
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
  const auto* api = exchange_api(reinterpret_cast<PyTypeObject*>(tensor_type.ptr()));
  py::tuple tensors(slab->placement().layout().size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i] = api != nullptr ? lend_by_api(*api, slab, i, batch_shape)
                                : lend_by_capsule(slab, i, batch_shape);
  }
  return tensors;
}

}  // namespace pycollect::python
