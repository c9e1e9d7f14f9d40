#include <pybind11/stl.h>

#include <stdexcept>

#include "bindings.h"
#include "borrow.h"
#include "pycollect/device_gather.h"

namespace pycollect::python {
namespace {

using cuda::DeviceGather;
using cuda::Stream;

cuda::Workspace workspace_from(const py::object& array) {
  const TensorView view = borrow(array, "workspace", nullptr, true);
  if (view.device.kind != DeviceKind::cuda || !view.is_contiguous()) {
    throw std::invalid_argument("workspace: expected a contiguous array on a CUDA device");
  }
  return {reinterpret_cast<cuda::DevicePointer>(view.data), view.bytes()};
}

using Form = void (DeviceGather::*)(const SplitPlan&, std::span<const ConstTensorView>,
                                    std::span<const TensorView>, cuda::Workspace, Stream) const;

template <Form form>
void split(const DeviceGather& gather, const SplitPlan& plan,
           const std::vector<py::object>& sources, const std::vector<py::object>& targets,
           const py::object& workspace, Stream stream) {
  const std::vector<ConstTensorView> from = borrow_sources(sources, "sources");
  const std::vector<TensorView> to = borrow_targets(targets, "targets");
  const cuda::Workspace room = workspace_from(workspace);
  const py::gil_scoped_release release;
  (gather.*form)(plan, from, to, room, stream);
}

void ahead(const DeviceGather& gather, const MultiStepPlan& plan, double gamma,
           const std::vector<py::object>& moved, const std::vector<py::object>& moved_to,
           const std::vector<py::object>& summed, const std::vector<py::object>& summed_to,
           const py::object& workspace, Stream stream) {
  const std::vector<ConstTensorView> from = borrow_sources(moved, "moved");
  const std::vector<TensorView> to = borrow_targets(moved_to, "moved_to");
  const std::vector<ConstTensorView> terms = borrow_sources(summed, "summed");
  const std::vector<TensorView> sums = borrow_targets(summed_to, "summed_to");
  const cuda::Workspace room = workspace_from(workspace);
  const py::gil_scoped_release release;
  gather.ahead(plan, {from, to, terms, sums, gamma}, room, stream);
}

}  // namespace

void bind_device_gather(py::module_& module) {
  py::class_<DeviceGather>(module, "DeviceGather", "Carries out plans on a device.")
      .def(py::init<int>(), py::arg("device"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("device", &DeviceGather::device)
      .def_static("workspace_bytes",
                  py::overload_cast<const SplitPlan&, std::size_t, std::int64_t>(
                      &DeviceGather::workspace_bytes),
                  py::arg("plan"), py::arg("leaves"), py::arg("target_bytes"),
                  "Return the required size of a workspace in bytes.")
      .def_static("workspace_bytes",
                  py::overload_cast<const MultiStepPlan&, std::size_t, std::int64_t>(
                      &DeviceGather::workspace_bytes),
                  py::arg("plan"), py::arg("leaves"), py::arg("target_bytes"),
                  "Return the required size of a workspace in bytes.")
      .def("padded", &split<&DeviceGather::padded>, py::arg("plan"), py::arg("sources"),
           py::arg("targets"), py::arg("workspace"), py::arg("stream"),
           "Do the same as SplitPlan.padded.")
      .def("flat", &split<&DeviceGather::flat>, py::arg("plan"), py::arg("sources"),
           py::arg("targets"), py::arg("workspace"), py::arg("stream"),
           "Do the same as SplitPlan.flat.")
      .def("ahead", &ahead, py::arg("plan"), py::arg("gamma"), py::arg("moved"),
           py::arg("moved_to"), py::arg("summed"), py::arg("summed_to"), py::arg("workspace"),
           py::arg("stream"), "Do MultiStepPlan.shift and sum.");
}

}  // namespace pycollect::python
