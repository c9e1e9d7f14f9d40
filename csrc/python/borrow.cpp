#include "borrow.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "dlpack.h"
#include "pycollect/copy.h"

namespace pycollect::python {
namespace {

// NumPy's type numbers, which are part of its ABI. On Linux, `long` has 64 bits.
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

int type_of_numpy(DType dtype, const char* what) {
  for (int type = 0; type <= 23; ++type) {
    if (dtype_of_numpy(type) == dtype) {
      return type;
    }
  }
  throw py::type_error(std::string(what) + ": expected a NumPy dtype, got " +
                       std::string(name_of(dtype)));
}

DType dtype_of_dlpack(const dlpack::DataType& type, const char* what) {
  for (int i = 0; i <= static_cast<int>(DType::complex128); ++i) {
    const dlpack::DataType known = dlpack::type_of(static_cast<DType>(i));
    if (known.code == type.code && known.bits == type.bits && type.lanes == 1) {
      return static_cast<DType>(i);
    }
  }
  throw py::type_error(std::string(what) + ": expected a numeric dtype, got DLPack's type code " +
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
    throw py::value_error(std::string(what) +
                          ": expected memory of the CPU or of a CUDA device, got " +
                          "DLPack's device type " + std::to_string(tensor.device.type));
  }
  if (view.data == nullptr && view.count() > 0) {
    throw py::value_error(std::string(what) +
                          ": expected a tensor with memory, got a fake one or one whose storage " +
                          "was freed");
  }
  return view;
}

// Whether a view of the tensor would differ from this view only in the address.
bool has_form(const dlpack::Tensor& tensor, const TensorView& view) {
  const auto item = static_cast<std::int64_t>(item_size(view.dtype));
  const dlpack::DataType type = dlpack::type_of(view.dtype);
  if (tensor.data == nullptr || tensor.device.type != dlpack::kCpu ||
      view.device.kind != DeviceKind::cpu || tensor.dtype.code != type.code ||
      tensor.dtype.bits != type.bits || tensor.dtype.lanes != type.lanes ||
      tensor.ndim != view.rank() || tensor.strides == nullptr) {
    return false;
  }
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] != view.shape[i] || tensor.strides[i] * item != view.strides[i]) {
      return false;
    }
  }
  return true;
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
    if ((managed->flags & dlpack::kIsCopied) == 0) {  // a copy is freed with the capsule
      return view_of_dlpack(managed->tensor, what);
    }
  }
  refuse(object, what);
}

// torch negates and conjugates lazily: it sets a bit and leaves the memory unchanged. DLPack
// ignores the bit, so such a tensor would be read wrong.
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
    if (!answer) {  // a tensor of another library has no such bit
      if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0 &&
          PyErr_ExceptionMatches(PyExc_TypeError) == 0) {
        throw py::error_already_set();
      }
      PyErr_Clear();
    } else if (answer.ptr() == Py_True) {
      throw py::value_error(
          std::string(what) + ": expected a tensor without lazy operations, got one " +
          "with a lazy negation or conjugation; call " + "resolve_neg() or resolve_conj() on it");
    }
  }
}

template <typename T>
TensorView put(ScalarRoom& room, DType dtype, T value) {
  std::memcpy(room.bytes, &value, sizeof(value));
  return TensorView::contiguous(room.bytes, dtype, Dims{});
}

// Views a Python or NumPy number: first bool, then integers (__index__; as a float if they exceed
// int64), then objects with __float__.
std::optional<TensorView> view_of_number(py::handle object, ScalarRoom& room) {
  PyObject* number = object.ptr();
  if (PyFloat_Check(number)) {
    return put(room, DType::float64, PyFloat_AS_DOUBLE(number));
  }
  if (const auto flag = plain_flag(object)) {  // before NumPy 2, its bools have an __index__
    return put(room, DType::boolean, static_cast<std::uint8_t>(*flag));
  }
  if (PyIndex_Check(number)) {
    const py::object index = py::reinterpret_steal<py::object>(PyNumber_Index(number));
    if (!index) {
      throw py::error_already_set();
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow != 0) {
      const double large = PyLong_AsDouble(index.ptr());
      if (PyErr_Occurred() != nullptr) {
        throw py::error_already_set();
      }
      return put(room, DType::float64, large);
    }
    return put(room, DType::int64, static_cast<std::int64_t>(value));
  }
  const auto* methods = Py_TYPE(number)->tp_as_number;
  if (methods == nullptr || methods->nb_float == nullptr) {
    return std::nullopt;
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
  const dlpack::Offer offer = dlpack::offer_of(Py_TYPE(object.ptr()));
  if (offer.api != nullptr) {
    dlpack::Tensor tensor;
    if (offer.api->view_of_object(object.ptr(), &tensor) != 0) {
      throw py::error_already_set();
    }
    const TensorView view = view_of_dlpack(tensor, what);
    refuse_lazy(object, view.dtype, what);
    return view;
  }
  if (offer.capsules) {  // before numbers: Python treats tensors as numbers
    const TensorView view = view_of_capsule(object, what);
    refuse_lazy(object, view.dtype, what);
    return view;
  }
  if (room != nullptr) {
    if (const auto number = view_of_number(object, *room)) {
      return *number;
    }
  }
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    // NumPy parses the format string. The view outlives this array, because the caller keeps the
    // object. A format without a dtype yields no array, or a copy.
    if (const py::array array = py::array::ensure(object); array && !array.owndata()) {
      return view_of_numpy(array, what, writable);
    }
  }
  refuse(object, what);
}

const TensorView& Borrower::operator()(py::handle object, const char* what) {
  if (is_like_array(object) || is_like_tensor(object, what)) {
    return view_;
  }
  dtype_ = py::object();
  tensor_ = py::object();
  view_ = borrow(object, what, &room_);
  if (py::isinstance<py::array>(object)) {
    dtype_ = py::reinterpret_borrow<py::array>(object).dtype();
  } else if (dlpack::offer_of(Py_TYPE(object.ptr())).api != nullptr) {
    tensor_ = py::reinterpret_borrow<py::object>(object);
  }
  return view_;
}

// Each native dtype of NumPy has a single descriptor object; arrays with other descriptors are
// viewed again.
bool Borrower::is_like_array(py::handle object) {
  if (!dtype_ || !py::isinstance<py::array>(object)) {
    return false;
  }
  const auto* proxy = py::detail::array_proxy(object.ptr());
  const auto same = [n = proxy->nd](const py::ssize_t* given, const Dims& known) {
    return n == known.size() && std::equal(given, given + n, known.begin());
  };
  if (proxy->descr != dtype_.ptr() || !same(proxy->dimensions, view_.shape) ||
      !same(proxy->strides, view_.strides)) {
    return false;
  }
  view_.data = reinterpret_cast<std::byte*>(proxy->data);
  return true;
}

bool Borrower::is_like_tensor(py::handle object, const char* what) {
  if (!tensor_ || Py_TYPE(object.ptr()) != Py_TYPE(tensor_.ptr())) {
    return false;
  }
  dlpack::Tensor tensor;
  if (dlpack::offer_of(Py_TYPE(object.ptr())).api->view_of_object(object.ptr(), &tensor) != 0) {
    throw py::error_already_set();
  }
  if (!has_form(tensor, view_)) {
    return false;
  }
  if (!object.is(tensor_)) {  // a tensor never becomes lazy later, so the last one is not
    refuse_lazy(object, view_.dtype, what);
    tensor_ = py::reinterpret_borrow<py::object>(object);
  }
  view_.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  return true;
}

py::object copied_to_numpy(const ConstTensorView& view, const char* what) {
  const auto& numpy = py::detail::npy_api::get();
  PyObject* dtype = numpy.PyArray_DescrFromType_(type_of_numpy(view.dtype, what));
  auto array = py::reinterpret_steal<py::object>(numpy.PyArray_NewFromDescr_(
      numpy.PyArray_Type_, dtype, view.rank(),
      reinterpret_cast<const Py_intptr_t*>(view.shape.begin()), nullptr, nullptr, 0, nullptr));
  if (!array) {
    throw py::error_already_set();
  }
  copy(TensorView::contiguous(py::detail::array_proxy(array.ptr())->data, view.dtype, view.shape),
       view);
  return array;
}

py::object sequence_as_array(py::handle object) {
  const bool is_sequence = PyList_Check(object.ptr()) || PyTuple_Check(object.ptr());
  return is_sequence ? py::object(py::module_::import("numpy").attr("asarray")(object))
                     : py::reinterpret_borrow<py::object>(object);
}

std::optional<double> plain_number(py::handle object) {
  if (PyFloat_Check(object.ptr())) {
    return PyFloat_AS_DOUBLE(object.ptr());
  }
  return std::nullopt;
}

std::optional<bool> plain_flag(py::handle object) {
  // As in Python, True and False of NumPy are single objects.
  const auto numpy_object = [](const char* name) {
    return py::module_::import("numpy").attr(name).cast<py::object>().release().ptr();
  };
  static PyObject* const numpy_true = numpy_object("True_");
  static PyObject* const numpy_false = numpy_object("False_");
  if (object.ptr() == Py_True || object.ptr() == numpy_true) {
    return true;
  }
  if (object.ptr() == Py_False || object.ptr() == numpy_false) {
    return false;
  }
  return std::nullopt;
}

std::vector<ConstTensorView> borrow_sources(const std::vector<py::object>& objects,
                                            const char* what) {
  std::vector<ConstTensorView> views;
  views.reserve(objects.size());
  for (const py::object& object : objects) {
    views.push_back(borrow(object, what));
  }
  return views;
}

std::vector<TensorView> borrow_targets(const std::vector<py::object>& objects, const char* what) {
  std::vector<TensorView> views;
  views.reserve(objects.size());
  for (const py::object& object : objects) {
    views.push_back(borrow(object, what, nullptr, true));
  }
  return views;
}

}  // namespace pycollect::python
