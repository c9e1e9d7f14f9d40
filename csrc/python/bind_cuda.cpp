#include <pybind11/stl.h>

#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "borrow.h"
#include "interop.h"
#include "pycollect/cuda.h"
#include "pycollect/uploader.h"

namespace pycollect::python {
namespace {

using cuda::DevicePointer;
using cuda::Stream;

std::span<const std::byte> bytes_of(const TensorView& view, const char* what) {
  if (view.device.kind != DeviceKind::cpu || !view.is_contiguous()) {
    throw std::invalid_argument(std::string(what) + ": expected a contiguous array in host memory");
  }
  return {view.data, static_cast<std::size_t>(view.bytes())};
}

std::shared_ptr<cuda::Upload> upload(cuda::Uploader& uploader, const py::object& source,
                                     DevicePointer target, Stream consumer,
                                     std::optional<Stream> after) {
  const auto bytes = bytes_of(borrow(source, "source"), "source");
  auto owner = kept(source);
  const py::gil_scoped_release release;
  return uploader.upload(std::move(owner), bytes, target, consumer, after);
}

cuda::Event recorded(int device, Stream stream, bool polls) {
  using Waiting = cuda::Event::Waiting;
  cuda::Event event(cuda::Context::of(device), polls ? Waiting::awake_first : Waiting::asleep);
  event.record(stream);
  return event;
}

using Release = py::call_guard<py::gil_scoped_release>;

}  // namespace

void bind_cuda(py::module_& module) {
  py::register_exception<cuda::Error>(module, "CudaError", PyExc_RuntimeError);
  module.def("cuda_why_not", &cuda::why_not, Release(),
             "Return why CUDA is not available; empty if it is.");

  module.def("host_memory", &cuda::host_memory, py::arg("device"), py::arg("bytes"), Release(),
             "Allocate pinned memory of exactly this size.");

  py::class_<cuda::Event>(module, "CudaEvent", "Marks the work queued on a stream so far.")
      .def(py::init(&recorded), py::arg("device"), py::arg("stream"), py::arg("polls") = false,
           Release())
      .def("done", &cuda::Event::done, Release(),
           "Return whether the host has seen the marked work done.")
      .def("wait", &cuda::Event::wait, Release(),
           "Sleep until the work is done; poll first if `polls`.")
      .def("hold_back", &cuda::Event::hold_back, py::arg("stream"), Release(),
           "Make later work of this stream wait.");

  py::class_<cuda::Upload, std::shared_ptr<cuda::Upload>>(module, "Upload", "A copy under way.")
      .def("done", &cuda::Upload::done, Release(),
           "Return whether the host has seen the copy complete.")
      .def("wait", &cuda::Upload::wait, Release(), "Sleep until the copy is complete.")
      .def("hold_back", &cuda::Upload::hold_back, py::arg("stream"), Release(),
           "Make later work of this stream wait.");

  py::class_<cuda::Uploader>(module, "Uploader", "Copies host memory to a device.")
      .def(py::init<int>(), py::arg("device"), Release())
      .def_property_readonly("device", &cuda::Uploader::device)
      .def_property_readonly("stream", &cuda::Uploader::stream)
      .def("upload", &upload, py::arg("source"), py::arg("target"), py::arg("consumer"),
           py::arg("after") = py::none(), "Start a copy of an array to an address on the device.")
      .def("release_finished", &cuda::Uploader::release_finished, Release(),
           "Release completed copies; return the number in progress.")
      .def("wait", &cuda::Uploader::wait, Release(), "Sleep until all copies are complete.");

  py::class_<cuda::Registration>(module, "Registration", "Keeps shared memory pinned.")
      .def(py::init([](std::shared_ptr<Memory> memory, int device) {
             return std::make_unique<cuda::Registration>(std::move(memory), device);
           }),
           py::arg("memory"), py::arg("device"), Release());
}

}  // namespace pycollect::python
