#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "borrow.h"
#include "pycollect/assemble.h"
#include "pycollect/copy.h"
#include "pycollect/slab.h"
#include "pycollect/thread_pool.h"

namespace pycollect::python {
namespace {

// (worker, local ids, global ids), one per worker.
using WorkerIds = std::tuple<std::int64_t, std::vector<std::int64_t>, std::vector<std::int64_t>>;
using IdsState = std::tuple<std::int64_t, std::vector<WorkerIds>>;

void copy_arrays(py::handle dst, py::handle src) {
  const TensorView target = borrow(dst, "dst", nullptr, true);
  const TensorView source = borrow(src, "src");
  py::gil_scoped_release release;
  parallel_copy(ThreadPool::shared(), target, source);
}

RolloutHeader place(const Slab& slab, std::int64_t row, py::handle rollout,
                    const Placement& placement) {
  const TensorView bytes = borrow(rollout, "rollout");
  if (bytes.dtype != DType::uint8 || bytes.rank() != 1 || !bytes.is_contiguous()) {
    throw std::invalid_argument("rollout: expected a contiguous uint8 array of rank 1, got " +
                                std::string(name_of(bytes.dtype)) + " of shape " +
                                to_string(bytes.shape));
  }
  py::gil_scoped_release release;
  return place_rollout(ThreadPool::shared(), slab.data(), slab.placement(), row,
                       {bytes.data, static_cast<std::size_t>(bytes.shape[0])}, placement);
}

RolloutHeader join(const Slab& target, std::int64_t row, const Slab& slab, std::int64_t worker,
                   std::int64_t incarnation, std::int64_t sequence) {
  RolloutHeader header;
  header.worker = worker;
  header.incarnation = incarnation;
  header.sequence = sequence;
  header.generation = target.generation();
  return join_rollouts(ThreadPool::shared(), target.data(), target.placement(), row,
                       {slab.data(), static_cast<std::size_t>(slab.bytes())}, slab.placement(),
                       header);
}

void compact_into(const Slab& target, const Slab& slab) {
  compact(ThreadPool::shared(), target.data(), target.placement(),
          {slab.data(), static_cast<std::size_t>(slab.bytes())}, slab.placement());
}

void renumber(TrajectoryIds& self, std::int64_t worker, py::handle ids) {
  // Keeps the GIL, so that only one thread uses a TrajectoryIds at a time. A call takes
  // microseconds.
  self.renumber(worker, borrow(ids, "ids", nullptr, true));
}

IdsState state_of(const TrajectoryIds& ids) {
  std::vector<WorkerIds> workers;
  for (const auto& [id, worker] : ids.state().workers) {
    workers.emplace_back(id, worker.local, worker.global);
  }
  return {ids.next(), std::move(workers)};
}

TrajectoryIds from_state(const IdsState& values) {
  TrajectoryIds::State state{std::get<0>(values), {}};
  for (const auto& [id, local, global] : std::get<1>(values)) {
    state.workers[id] = {local, global};
  }
  return TrajectoryIds(std::move(state));
}

}  // namespace

void bind_assemble(py::module_& module) {
  module.def("copy", &copy_arrays, py::arg("dst"), py::arg("src"),
             "Copy one array into another of equal shape, with any strides and dtypes.");
  module.def("place_rollout", &place, py::arg("slab"), py::arg("row"), py::arg("rollout"),
             py::arg("placement"),
             "Copy one worker's rollout (its slab as uint8) into its row of a batch's slab.");

  module.def("join_rollouts", &join, py::arg("target"), py::arg("row"), py::arg("slab"),
             py::arg("worker"), py::arg("incarnation"), py::arg("sequence"),
             py::call_guard<py::gil_scoped_release>(),
             "Copy a whole batch into a row of another, as the rollout of one worker.");
  module.def("compact", &compact_into, py::arg("target"), py::arg("slab"),
             py::call_guard<py::gil_scoped_release>(),
             "Copy a batch whose rollouts ended early, without its uncollected cells.");

  py::class_<TrajectoryIds>(module, "TrajectoryIds",
                            "Maps workers' trajectory ids to global ones, without gaps.")
      .def(py::init<>())
      .def_static("from_state", &from_state, py::arg("state"))
      .def("renumber", &renumber, py::arg("worker"), py::arg("ids"),
           "Replace a rollout's ids, int64 [P, T], by global ones in place.")
      .def("issue", &TrajectoryIds::issue, py::arg("count"),
           "Number new trajectories; return the first id.")
      .def("forget", &TrajectoryIds::forget, py::arg("worker"),
           "End the open trajectories of a replaced worker.")
      .def_property_readonly("next", &TrajectoryIds::next)
      .def("state", &state_of);
}

}  // namespace pycollect::python
