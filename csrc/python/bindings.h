// The functions that add each binding file to the module. Bindings convert arguments, release the
// GIL while data moves, and call the core. They contain no logic.
#pragma once

#include <pybind11/pybind11.h>

namespace pycollect::python {

namespace py = pybind11;

void bind_assemble(py::module_& module);
void bind_compiled_env(py::module_& module);
void bind_cuda(py::module_& module);
void bind_device_gather(py::module_& module);
void bind_fair_lock(py::module_& module);
void bind_layout(py::module_& module);
void bind_mailbox(py::module_& module);
void bind_multistep(py::module_& module);
void bind_recorder(py::module_& module);
void bind_shared(py::module_& module);
void bind_slab(py::module_& module);
void bind_slot(py::module_& module);
void bind_split(py::module_& module);
void bind_step_each(py::module_& module);
void bind_uninterrupted(py::module_& module);

}  // namespace pycollect::python
