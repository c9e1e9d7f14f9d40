#include "bindings.h"

#include "pycollect/version.h"

PYBIND11_MODULE(_core, module) {
  using namespace pycollect::python;
  module.doc() = "The compiled core of pycollect.";
  module.attr("__version__") = pycollect::version();
  bind_layout(module);
  bind_shared(module);
  bind_slab(module);
  bind_mailbox(module);
  bind_slot(module);
  bind_compiled_env(module);
  bind_recorder(module);
  bind_step_each(module);
  bind_assemble(module);
  bind_split(module);
  bind_multistep(module);
  bind_cuda(module);
  bind_device_gather(module);
  bind_uninterrupted(module);
  bind_fair_lock(module);
}
