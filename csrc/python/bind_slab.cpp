#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "interop.h"
#include "lend.h"
#include "pycollect/header.h"
#include "pycollect/slab.h"
#include "pycollect/slab_pool.h"

namespace pycollect::python {
namespace {

// The whole slab as a NumPy array of bytes that keeps the slab alive.
py::array_t<std::uint8_t> whole_slab(const std::shared_ptr<Slab>& slab) {
  const auto* data = reinterpret_cast<const std::uint8_t*>(slab->data());
  return py::array_t<std::uint8_t>(slab->bytes(), data, py::cast(slab));
}

py::tuple tensors_of(const std::shared_ptr<Slab>& slab,
                     const std::vector<std::int64_t>& batch_shape, py::handle tensor_type) {
  return lend_tensors(slab, Dims(std::span(batch_shape)), tensor_type);
}

RolloutHeader header_of(const Slab& slab, std::int64_t row) {
  return read_header({slab.data(), static_cast<std::size_t>(slab.bytes())}, slab.placement(), row);
}

std::vector<std::int64_t> lengths_of(const Slab& slab, std::int64_t row) {
  return read_lengths({slab.data(), static_cast<std::size_t>(slab.bytes())}, slab.placement(), row);
}

RolloutHeader write_header_of(Slab& slab, std::int64_t row, std::int64_t worker,
                              std::int64_t incarnation, std::int64_t sequence,
                              std::int64_t policy_version, std::int64_t frames,
                              std::int64_t steps) {
  RolloutHeader header;
  header.worker = worker;
  header.incarnation = incarnation;
  header.sequence = sequence;
  header.policy_version = policy_version;
  header.frames = frames;
  header.generation = slab.generation();
  const auto envs = static_cast<std::size_t>(slab.placement().geometry().envs);
  write_header(slab.data(), slab.placement(), row, header, std::vector<std::int64_t>(envs, steps));
  lengths_of(slab, row);  // throws if `steps` does not fit
  return header_of(slab, row);
}

// Converts a Python function, which returns a uint8 array of the requested size, to an allocator of
// a pool. The arrays are kept until the pool frees their memory.
MemoryPool::Allocate allocator(const py::object& function) {
  if (function.is_none()) {
    return nullptr;
  }
  return [function = kept(function)](std::int64_t bytes) {
    py::gil_scoped_acquire gil;
    auto array =
        py::reinterpret_borrow<py::object>(function.get())(bytes).cast<py::array_t<std::uint8_t>>();
    auto* data = reinterpret_cast<std::byte*>(array.mutable_data());
    const auto size = static_cast<std::int64_t>(array.nbytes());
    return std::make_shared<Memory>(data, size, [array = kept(array)](std::byte*) {});
  };
}

}  // namespace

void bind_slab(py::module_& module) {
  py::class_<Slab, std::shared_ptr<Slab>>(module, "Slab", "A lease of one batch's memory.")
      .def_property_readonly("placement", &Slab::placement)
      .def_property_readonly("bytes", &Slab::bytes)
      .def_property_readonly("generation", &Slab::generation)
      .def_property_readonly("memory", &Slab::memory)
      .def("array", &whole_slab, "Return all bytes as an array that holds the slab.")
      .def("header", &header_of, py::arg("row") = 0,
           "Return the checked header of a worker's rollout.")
      .def("write_header", &write_header_of, py::arg("row"), py::arg("worker"),
           py::arg("incarnation"), py::arg("sequence"), py::arg("policy_version"),
           py::arg("frames"), py::arg("steps"),
           "Write and return the header of a rollout that other code recorded.")
      .def("lengths", &lengths_of, py::arg("row") = 0,
           "Return the valid length of the rollout per env.")
      .def("tensors", &tensors_of, py::arg("batch_shape"), py::arg("tensor_type"),
           "Return one tensor per leaf, [*batch_shape, *frame].");

  py::class_<PoolStats>(module, "PoolStats", "Numbers of a pool's memory blocks.")
      .def_readonly("created", &PoolStats::created)
      .def_readonly("lent", &PoolStats::lent)
      .def_readonly("free", &PoolStats::free);

  py::class_<MemoryPool>(module, "MemoryPool", "A pool of memory for any placement.")
      .def(py::init<std::int64_t, bool>(), py::arg("max_free"), py::arg("poison") = false)
      .def("acquire", py::overload_cast<Placement>(&MemoryPool::acquire), py::arg("placement"),
           py::call_guard<py::gil_scoped_release>())
      .def("stats", &MemoryPool::stats);

  py::class_<SlabPool>(module, "SlabPool", "A pool of slabs with one placement.")
      .def(py::init([](Placement placement, std::int64_t max_free, bool poison,
                       const py::object& allocate) {
             return SlabPool(std::move(placement), max_free, poison, allocator(allocate));
           }),
           py::arg("placement"), py::arg("max_free"), py::arg("poison") = false,
           py::arg("allocate") = py::none())
      .def("acquire", &SlabPool::acquire, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("placement", &SlabPool::placement)
      .def("stats", &SlabPool::stats);
}

}  // namespace pycollect::python
