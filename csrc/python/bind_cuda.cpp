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
             "Why CUDA cannot be used here; empty where it can.");

  module.def("host_memory", &cuda::host_memory, py::arg("device"), py::arg("bytes"), Release(),
             "Pinned memory of exactly that size.");

  py::class_<cuda::Event>(module, "CudaEvent", "The end of what a stream was given so far.")
      .def(py::init(&recorded), py::arg("device"), py::arg("stream"), py::arg("polls") = false,
           Release())
      .def("done", &cuda::Event::done, Release(), "Whether that is done, as the host sees it.")
      .def("wait", &cuda::Event::wait, Release(), "Sleep until it is; poll first if it `polls`.")
      .def("hold_back", &cuda::Event::hold_back, py::arg("stream"), Release(),
           "What that stream is given from now on waits for it.");

  py::class_<cuda::Upload, std::shared_ptr<cuda::Upload>>(module, "Upload", "A copy under way.")
      .def("done", &cuda::Upload::done, Release(), "Whether it is complete, as the host sees it.")
      .def("wait", &cuda::Upload::wait, Release(), "Sleep until it is.")
      .def("hold_back", &cuda::Upload::hold_back, py::arg("stream"), Release(),
           "What that stream is given from now on waits for it.");

  py::class_<cuda::Uploader>(module, "Uploader", "Copies host memory to a device.")
      .def(py::init<int>(), py::arg("device"), Release())
      .def_property_readonly("device", &cuda::Uploader::device)
      .def_property_readonly("stream", &cuda::Uploader::stream)
      .def("upload", &upload, py::arg("source"), py::arg("target"), py::arg("consumer"),
           py::arg("after") = py::none(),
           "Have an array copied to that address; `consumer` waits for it.")
      .def("release_finished", &cuda::Uploader::release_finished, Release(),
           "Let go of the sources of complete copies; how many are under way.")
      .def("wait", &cuda::Uploader::wait, Release(), "Sleep until all copies are complete.");

  py::class_<cuda::Registration>(module, "Registration", "Shared memory that is pinned.")
      .def(py::init([](std::shared_ptr<Memory> memory, int device) {
             return std::make_unique<cuda::Registration>(std::move(memory), device);
           }),
           py::arg("memory"), py::arg("device"), Release());
}

}  // namespace pycollect::python
