#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>

#include "address.h"
#include "bindings.h"
#include "pycollect/detail/memory_limits.h"
#include "pycollect/shared_memory.h"
#include "pycollect/shared_slab_pool.h"
#include "pycollect/slab.h"
#include "pycollect/thread_pool.h"

namespace pycollect::python {
namespace {

std::optional<Address> address_of(const Memory& memory) {
  const auto& address = memory.address();
  return address ? std::optional(to_python(*address)) : std::nullopt;
}

std::shared_ptr<Memory> attach(const Address& address) {
  return attach_memory(from_python(address));
}

// All of it as a numpy array of bytes that holds the memory.
py::array_t<std::uint8_t> whole_memory(const std::shared_ptr<Memory>& memory) {
  const auto* data = reinterpret_cast<const std::uint8_t*>(memory->data());
  return py::array_t<std::uint8_t>(memory->bytes(), data, py::cast(memory));
}

std::shared_ptr<Slab> slab_over(const std::shared_ptr<Memory>& memory, const Placement& placement,
                                std::uint64_t generation) {
  return std::make_shared<Slab>(memory, std::make_shared<const Placement>(placement), generation);
}

std::tuple<std::int64_t, std::string> available() {
  const MemoryLimit limit = available_memory();
  return {limit.bytes, limit.source};
}

std::shared_ptr<Slab> deliver(SharedSlabPool& pool, const std::shared_ptr<Slab>& slab) {
  return pool.deliver(ThreadPool::shared(), slab);
}

}  // namespace

void bind_shared(py::module_& module) {
  py::register_exception<SharedMemoryError>(module, "SharedMemoryError", PyExc_RuntimeError);
  module.def("shared_memory_why_not", &shared_memory_why_not,
             "Why this process cannot share memory with its workers; empty where it can.");
  module.def("available_memory", &available,
             "How many bytes can still be taken, and whose limit that is.");

  py::class_<Memory, std::shared_ptr<Memory>>(module, "Memory", "A block of host memory.")
      .def_static("share", &share_memory, py::arg("bytes"),
                  py::call_guard<py::gil_scoped_release>(),
                  "New shared memory without a name, zeroed and touched.")
      .def_static("attach", &attach, py::arg("address"), py::call_guard<py::gil_scoped_release>(),
                  "Another process's shared memory, mapped here.")
      .def_property_readonly("bytes", &Memory::bytes)
      .def_property_readonly("address", &address_of)
      .def("array", &whole_memory, "All of it as a writable uint8 array that holds the memory.")
      .def("slab", &slab_over, py::arg("placement"), py::arg("generation"),
           "This memory seen as a slab that another process has lent.");

  py::class_<SharedSlabPool>(module, "SharedSlabPool", "Slabs that worker processes write into.")
      .def(py::init<Placement, std::int64_t, std::int64_t, bool>(), py::arg("placement"),
           py::arg("working"), py::arg("spare"), py::arg("poison") = false,
           py::call_guard<py::gil_scoped_release>())
      .def("acquire", &SharedSlabPool::acquire, py::call_guard<py::gil_scoped_release>(),
           "Return a free slab, or a new one if all are lent.")
      .def("deliver", &deliver, py::arg("slab"), py::call_guard<py::gil_scoped_release>(),
           "That slab for the user to keep, or a private copy where too few would remain.")
      .def("pin", &SharedSlabPool::pin, py::arg("device"), py::call_guard<py::gil_scoped_release>(),
           "Have a CUDA device read these slabs where they are, as long as there are any.")
      .def_property_readonly("placement", &SharedSlabPool::placement)
      .def_property_readonly("copied", &SharedSlabPool::copied)
      .def("stats", &SharedSlabPool::stats);
}

}  // namespace pycollect::python
