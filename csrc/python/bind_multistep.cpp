#include <pybind11/stl.h>

#include "bindings.h"
#include "borrow.h"
#include "pycollect/multistep.h"
#include "pycollect/thread_pool.h"

namespace pycollect::python {
namespace {

void shift(const MultiStepPlan& plan, const std::vector<py::object>& sources,
           const std::vector<py::object>& targets) {
  const std::vector<ConstTensorView> from = borrow_sources(sources, "sources");
  const std::vector<TensorView> to = borrow_targets(targets, "targets");
  py::gil_scoped_release release;
  plan.shift(ThreadPool::shared(), from, to);
}

void sum(const MultiStepPlan& plan, double gamma, const std::vector<py::object>& sources,
         const std::vector<py::object>& targets) {
  const std::vector<ConstTensorView> from = borrow_sources(sources, "sources");
  const std::vector<TensorView> to = borrow_targets(targets, "targets");
  py::gil_scoped_release release;
  plan.sum(ThreadPool::shared(), gamma, from, to);
}

void discounts(const MultiStepPlan& plan, double gamma, py::handle target) {
  const TensorView view = borrow(target, "target", nullptr, true);
  py::gil_scoped_release release;
  plan.discounts(gamma, view);
}

using Fill = void (MultiStepPlan::*)(const TensorView&) const;

template <Fill fill>
void write(const MultiStepPlan& plan, py::handle target) {
  const TensorView view = borrow(target, "target", nullptr, true);
  py::gil_scoped_release release;
  (plan.*fill)(view);
}

}  // namespace

void bind_multistep(py::module_& module) {
  py::class_<MultiStepPlan>(module, "MultiStepPlan", "The steps that each frame looks ahead.")
      .def(py::init<const SplitPlan&, std::int64_t>(), py::arg("split"), py::arg("n_steps"),
           py::call_guard<py::gil_scoped_release>())
      .def("shift", &shift, py::arg("sources"), py::arg("targets"),
           "Write, for each cell, the frame that it leads to.")
      .def("sum", &sum, py::arg("gamma"), py::arg("sources"), py::arg("targets"),
           "Write, for each cell, the discounted sum of frames ahead.")
      .def("steps", &write<&MultiStepPlan::steps>, py::arg("target"),
           "Write the steps each cell looks ahead to int64 [*batch].")
      .def("discounts", &discounts, py::arg("gamma"), py::arg("target"),
           "gamma to the power of the steps of each cell of [*batch].")
      .def("nonterminal", &write<&MultiStepPlan::nonterminal>, py::arg("target"),
           "Write whether another frame follows to bool [*batch].");
}

}  // namespace pycollect::python
