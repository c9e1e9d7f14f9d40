// What each binding file adds to the module. A binding converts, releases the GIL where data
// moves, and calls: it holds no logic.
#pragma once

#include <pybind11/pybind11.h>

namespace pycollect::python {

void bind_assemble(pybind11::module_& module);
void bind_cuda(pybind11::module_& module);
void bind_device_gather(pybind11::module_& module);
void bind_layout(pybind11::module_& module);
void bind_mailbox(pybind11::module_& module);
void bind_multistep(pybind11::module_& module);
void bind_recorder(pybind11::module_& module);
void bind_shared(pybind11::module_& module);
void bind_slab(pybind11::module_& module);
void bind_split(pybind11::module_& module);

}  // namespace pycollect::python
