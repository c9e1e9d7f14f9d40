#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "borrow.h"
#include "compiled_env.h"

namespace pycollect::python {
namespace {

// An array over memory of the environments. It keeps them alive.
py::array array_over(const TensorView& view, const py::object& self) {
  if (view.dtype == DType::bfloat16) {
    throw std::invalid_argument(
        "create_env_fn: expected observations with a NumPy dtype, got bfloat16");
  }
  return {py::dtype(std::string(name_of(view.dtype))),
          std::vector<py::ssize_t>(view.shape.begin(), view.shape.end()),
          std::vector<py::ssize_t>(view.strides.begin(), view.strides.end()), view.data, self};
}

py::tuple arrays_over(std::span<const TensorView> views, const py::object& self) {
  py::tuple result(views.size());
  for (std::size_t i = 0; i < views.size(); ++i) {
    result[i] = array_over(views[i], self);
  }
  return result;
}

const detail::SteppedEnvs& envs_of(const py::object& self) {
  return self.cast<CompiledEnv&>().envs();
}

}  // namespace

void bind_compiled_env(py::module_& module) {
  using Flags = py::array_t<bool, py::array::c_style>;
  py::class_<CompiledEnv>(module, "CompiledEnv", "Environments of another extension module.")
      .def(py::init<py::object>(), py::arg("owner"))
      .def_property_readonly("num_envs", [](const CompiledEnv& self) { return self.envs().envs(); })
      .def_property_readonly("num_seeds", &CompiledEnv::seeds)
      .def_property_readonly(
          "observation", [](const CompiledEnv& self) { return self.envs().observation_leaves(); })
      .def_property_readonly("action",
                             [](const CompiledEnv& self) { return self.envs().action_leaves(); })
      .def_property_readonly(
          "observations",
          [](const py::object& self) { return arrays_over(envs_of(self).observations(), self); })
      .def_property_readonly("outcome",
                             [](const py::object& self) {
                               const detail::SteppedEnvs& envs = envs_of(self);
                               return py::make_tuple(array_over(envs.reward(), self),
                                                     array_over(envs.terminated(), self),
                                                     array_over(envs.truncated(), self));
                             })
      .def(
          "seed",
          [](const CompiledEnv& self, const std::vector<std::uint64_t>& seeds) {
            if (static_cast<std::int64_t>(seeds.size()) != self.seeds()) {
              throw std::invalid_argument("seeds: expected " + std::to_string(self.seeds()) +
                                          " seeds, got " + std::to_string(seeds.size()));
            }
            self.owner().attr("_seed")(seeds);
          },
          py::arg("seeds"))
      .def("reset_all", &CompiledEnv::reset_all)
      .def(
          "reset",
          [](CompiledEnv& self, const Flags& done) {
            self.reset({reinterpret_cast<const std::uint8_t*>(done.data()),
                        static_cast<std::size_t>(done.size())});
          },
          py::arg("done"))
      .def(
          "step",
          [](CompiledEnv& self, const std::vector<py::object>& actions) {
            self.step(borrow_sources(actions, "actions"));
          },
          py::arg("actions"));
}

}  // namespace pycollect::python
