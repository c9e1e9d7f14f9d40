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

std::shared_ptr<Memory> copy_of(const py::buffer& data) {
  const py::buffer_info view = data.request();
  if (PyBuffer_IsContiguous(view.view(), 'C') == 0) {
    throw std::invalid_argument("data: expected contiguous bytes");
  }
  const std::span bytes(static_cast<const std::byte*>(view.ptr),
                        static_cast<std::size_t>(view.size * view.itemsize));
  const py::gil_scoped_release release;
  return share_copy(bytes);
}

std::shared_ptr<Memory> attach(const Address& address) {
  return attach_memory(from_python(address));
}

// All bytes as a NumPy array that keeps the memory alive.
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
             "Return why this process cannot share memory; empty if it can.");
  module.def("available_memory", &available,
             "Return how many bytes can be allocated, and the limit's name.");

  py::class_<Memory, std::shared_ptr<Memory>>(module, "Memory", "A block of host memory.")
      .def_static("share", &share_memory, py::arg("bytes"),
                  py::call_guard<py::gil_scoped_release>(), "Create shared memory without a name.")
      .def_static("share_copy", &copy_of, py::arg("data"), "Copy bytes into new shared memory.")
      .def_static("attach", &attach, py::arg("address"), py::call_guard<py::gil_scoped_release>(),
                  "Map another process's shared memory.")
      .def_property_readonly("bytes", &Memory::bytes)
      .def_property_readonly("address", &address_of)
      .def("array", &whole_memory, "Return all bytes as an array that holds the memory.")
      .def("slab", &slab_over, py::arg("placement"), py::arg("generation"),
           "Return this memory as a slab of another process.");

  py::class_<SharedSlabPool>(module, "SharedSlabPool", "Slabs that worker processes write into.")
      .def(py::init<Placement, std::int64_t, std::int64_t, bool>(), py::arg("placement"),
           py::arg("working"), py::arg("spare"), py::arg("poison") = false,
           py::call_guard<py::gil_scoped_release>())
      .def("acquire", &SharedSlabPool::acquire, py::call_guard<py::gil_scoped_release>(),
           "Return a free slab, or a new one if all are lent.")
      .def("deliver", &deliver, py::arg("slab"), py::call_guard<py::gil_scoped_release>(),
           "Return this slab for the user to keep, or a private copy.")
      .def("pin", &SharedSlabPool::pin, py::arg("device"), py::call_guard<py::gil_scoped_release>(),
           "Let a CUDA device read the slabs without a copy.")
      .def_property_readonly("placement", &SharedSlabPool::placement)
      .def_property_readonly("copied", &SharedSlabPool::copied)
      .def("stats", &SharedSlabPool::stats);
}

}  // namespace pycollect::python
