#include <pybind11/stl.h>

#include "bindings.h"
#include "interop.h"
#include "pycollect/header.h"
#include "pycollect/layout.h"

namespace pycollect::python {
namespace {

py::tuple dims_to_python(const Dims& dims) {
  py::tuple result(static_cast<std::size_t>(dims.size()));
  for (int i = 0; i < dims.size(); ++i) {
    result[static_cast<std::size_t>(i)] = dims[i];
  }
  return result;
}

py::tuple leaf_fields(const Leaf& leaf) {
  return py::make_tuple(key_to_python(leaf.key), std::string(name_of(leaf.dtype)),
                        dims_to_python(leaf.shape));
}

Order order_named(const std::string& name) {
  if (name == "stack" || name == "time") {
    return name == "stack" ? Order::stack : Order::time;
  }
  throw std::invalid_argument("order: expected \"stack\" or \"time\", got \"" + name + "\"");
}

Placement make_placement(const Layout& layout, std::int64_t workers, std::int64_t envs,
                         std::int64_t steps, const std::string& order) {
  return Placement(layout, {workers, envs, steps, order_named(order)});
}

}  // namespace

void bind_layout(py::module_& module) {
  py::class_<Leaf>(module, "Leaf", "One tensor of a frame: key path, dtype name, frame shape.")
      .def(py::init(&leaf_from), py::arg("key"), py::arg("dtype"), py::arg("shape"))
      .def_property_readonly("key", [](const Leaf& leaf) { return key_to_python(leaf.key); })
      .def_property_readonly("dtype",
                             [](const Leaf& leaf) { return std::string(name_of(leaf.dtype)); })
      .def_property_readonly("shape", [](const Leaf& leaf) { return dims_to_python(leaf.shape); })
      .def(
          "__eq__", [](const Leaf& a, const Leaf& b) { return a == b; }, py::is_operator())
      .def("__hash__", [](const Leaf& leaf) { return py::hash(leaf_fields(leaf)); })
      .def("__repr__",
           [](const Leaf& leaf) { return "Leaf" + std::string(py::repr(leaf_fields(leaf))); })
      .def(py::pickle(&leaf_fields, [](const py::tuple& fields) {
        return leaf_from(fields[0], fields[1].cast<std::string>(),
                         fields[2].cast<std::vector<std::int64_t>>());
      }));

  py::class_<Layout>(module, "Layout", "The ordered leaves of a batch.")
      .def(py::init<std::vector<Leaf>>(), py::arg("leaves"))
      .def_property_readonly("leaves",
                             [](const Layout& layout) {
                               const auto leaves = layout.leaves();
                               return std::vector<Leaf>(leaves.begin(), leaves.end());
                             })
      .def_property_readonly("fingerprint", &Layout::fingerprint)
      .def("__len__", &Layout::size);

  py::class_<Placement>(module, "Placement", "The positions of a layout's leaves in a slab.")
      .def(py::init(&make_placement), py::arg("layout"), py::arg("workers"), py::arg("envs"),
           py::arg("steps"), py::arg("order") = "stack")
      .def_property_readonly("layout", &Placement::layout)
      .def_property_readonly("bytes", &Placement::bytes)
      .def_property_readonly("workers",
                             [](const Placement& self) { return self.geometry().workers; })
      .def_property_readonly("envs", [](const Placement& self) { return self.geometry().envs; })
      .def_property_readonly("steps", [](const Placement& self) { return self.geometry().steps; });

  py::class_<RolloutHeader>(module, "RolloutHeader", "The header of a rollout.")
      .def_readonly("worker", &RolloutHeader::worker)
      .def_readonly("incarnation", &RolloutHeader::incarnation)
      .def_readonly("sequence", &RolloutHeader::sequence)
      .def_readonly("policy_version", &RolloutHeader::policy_version)
      .def_readonly("envs", &RolloutHeader::envs)
      .def_readonly("steps", &RolloutHeader::steps)
      .def_readonly("frames", &RolloutHeader::frames)
      .def_readonly("generation", &RolloutHeader::generation);
}

}  // namespace pycollect::python
