#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "bindings.h"
#include "borrow.h"
#include "pycollect/split.h"
#include "pycollect/thread_pool.h"

namespace pycollect::python {
namespace {

std::optional<TensorView> borrow_optional(py::handle object, const char* what) {
  return object.is_none() ? std::nullopt : std::optional(borrow(object, what));
}

py::array_t<std::int64_t> array_of(std::span<const std::int64_t> values) {
  return py::array_t<std::int64_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::array_t<std::int64_t> rows_of(const SplitPlan& plan) {
  py::array_t<std::int64_t> rows(plan.count());
  std::ranges::transform(plan.segments(), rows.mutable_data(), &Segment::row);
  return rows;
}

SplitPlan make_plan(py::handle done, py::handle ids, py::handle mask, int batch_dims) {
  const auto done_view = borrow_optional(done, "done");
  const auto ids_view = borrow_optional(ids, "ids");
  const auto mask_view = borrow_optional(mask, "mask");
  py::gil_scoped_release release;
  return SplitPlan(done_view, ids_view, mask_view, batch_dims);
}

using Form = void (SplitPlan::*)(ThreadPool&, std::span<const ConstTensorView>,
                                 std::span<const TensorView>) const;

template <Form form>
void gather(const SplitPlan& plan, const std::vector<py::object>& sources,
            const std::vector<py::object>& targets) {
  const std::vector<ConstTensorView> from = borrow_sources(sources, "sources");
  const std::vector<TensorView> to = borrow_targets(targets, "targets");
  py::gil_scoped_release release;
  (plan.*form)(ThreadPool::shared(), from, to);
}

void fill_mask(const SplitPlan& plan, py::handle target) {
  const TensorView view = borrow(target, "target", nullptr, true);
  py::gil_scoped_release release;
  plan.mask(view);
}

void pad(const SplitPlan& plan, py::handle target, std::int64_t value) {
  const TensorView view = borrow(target, "target", nullptr, true);
  py::gil_scoped_release release;
  plan.pad(view, value);
}

}  // namespace

void bind_split(py::module_& module) {
  py::class_<SplitPlan>(module, "SplitPlan", "The trajectories of one batch, in row-major order.")
      .def(py::init(&make_plan), py::arg("done"), py::arg("ids") = py::none(),
           py::arg("mask") = py::none(), py::kw_only(), py::arg("batch_dims"))
      .def_property_readonly("count", &SplitPlan::count)
      .def_property_readonly("longest", &SplitPlan::longest)
      .def_property_readonly("frames", &SplitPlan::frames)
      .def_property_readonly(
          "offsets", [](const SplitPlan& plan) { return array_of(plan.offsets()); },
          "int64 [count + 1]: trajectory i is [offsets[i], offsets[i + 1]) in the flat form.")
      .def_property_readonly(
          "lengths", [](const SplitPlan& plan) { return array_of(plan.lengths()); },
          "int64 [count].")
      .def_property_readonly("rows", &rows_of,
                             "int64 [count]: batch dimensions but the last, counted as one.")
      .def("padded", &gather<&SplitPlan::padded>, py::arg("sources"), py::arg("targets"),
           "Copy sources into padded targets [count, longest, *frame].")
      .def("flat", &gather<&SplitPlan::flat>, py::arg("sources"), py::arg("targets"),
           "Copy sources into flat targets [frames, *frame].")
      .def("mask", &fill_mask, py::arg("target"),
           "Write to bool [count, longest] if a cell holds a frame.")
      .def("pad", &pad, py::arg("target"), py::arg("value"),
           "Fill the padding of a leaf with a value other than zero.");
}

}  // namespace pycollect::python
