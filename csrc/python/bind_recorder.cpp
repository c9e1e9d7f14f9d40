#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <span>

#include "bindings.h"
#include "interop.h"
#include "pycollect/recorder.h"

namespace pycollect::python {
namespace {

// Views of a tuple of arrays, or of one array, in memory that is taken once.
class Views {
 public:
  Views(std::size_t size, const char* what) : views_(size), rooms_(size), what_(what) {}

  std::span<const TensorView> borrow_from(py::handle arrays) {
    if (!py::isinstance<py::tuple>(arrays)) {
      return borrow_one(arrays);
    }
    const auto tuple = py::reinterpret_borrow<py::tuple>(arrays);
    if (tuple.size() != views_.size()) {
      throw std::invalid_argument(std::string(what_) + ": expected " +
                                  std::to_string(views_.size()) + " arrays, got " +
                                  std::to_string(tuple.size()));
    }
    for (std::size_t i = 0; i < views_.size(); ++i) {
      views_[i] = borrow(tuple[i], what_, &rooms_[i]);
    }
    return views_;
  }

 private:
  std::span<const TensorView> borrow_one(py::handle array) {
    if (views_.size() != 1) {
      throw std::invalid_argument(std::string(what_) + ": expected a tuple of " +
                                  std::to_string(views_.size()) + " arrays, got one");
    }
    views_[0] = borrow(array, what_, &rooms_[0]);
    return views_;
  }

  std::vector<TensorView> views_;
  std::vector<ScalarRoom> rooms_;
  const char* what_;
};

// Past this many bytes in a step, releasing the GIL (60 ns) is worth it.
constexpr std::int64_t kReleaseFrom = 64 << 10;

std::int64_t step_bytes(const Layout& layout, std::int64_t envs) {
  std::int64_t bytes = 0;
  for (const Leaf& leaf : layout.leaves()) {
    bytes += leaf.frame_bytes() * envs;
  }
  return bytes;
}

// (key, current, live) each; current is None for what is not carried.
std::vector<ObservationSpec> observation_specs(const std::vector<py::tuple>& observations) {
  std::vector<ObservationSpec> result;
  for (const py::tuple& spec : observations) {
    const bool carried = !spec[1].is_none();
    const TensorView current = carried ? borrow(spec[1], "current", nullptr, true) : TensorView{};
    result.push_back({key_from(spec[0]), current, spec[2].cast<bool>(), carried});
  }
  return result;
}

// (key, current, initial) each.
std::vector<StateSpec> state_specs(const std::vector<py::tuple>& states) {
  std::vector<StateSpec> result;
  for (const py::tuple& spec : states) {
    result.push_back(
        {key_from(spec[0]), borrow(spec[1], "current", nullptr, true), borrow(spec[2], "initial")});
  }
  return result;
}

std::vector<Key> keys_from(const std::vector<py::tuple>& tuples) {
  std::vector<Key> result;
  for (const py::tuple& tuple : tuples) {
    result.push_back(key_from(tuple));
  }
  return result;
}

std::optional<TensorView> optional_view(py::handle array, const char* what) {
  return array.is_none() ? std::nullopt : std::optional(borrow(array, what, nullptr, true));
}

class BoundRecorder {
 public:
  BoundRecorder(const Layout& layout, const std::vector<py::tuple>& observations,
                const std::vector<py::tuple>& outputs, const RecorderOptions& options,
                const std::vector<py::tuple>& states, const py::object& is_init,
                const py::object& step_count)
      : held_{py::cast(observations), py::cast(states), is_init, step_count},
        recorder_(layout, observation_specs(observations), keys_from(outputs), options,
                  state_specs(states), optional_view(is_init, "is_init"),
                  optional_view(step_count, "step_count")),
        observation_(observations.size(), "observation"),
        outputs_(outputs.size(), "outputs"),
        states_(states.size(), "states"),
        releases_(step_bytes(layout, options.envs) >= kReleaseFrom) {}

  std::int64_t step(py::handle observation, py::handle reward, py::handle terminated,
                    py::handle truncated, py::handle outputs, py::handle states) {
    ScalarRoom rooms[3];
    const StepData data{observation_.borrow_from(observation),
                        borrow(reward, "reward", &rooms[0]),
                        borrow(terminated, "terminated", &rooms[1]),
                        borrow(truncated, "truncated", &rooms[2]),
                        outputs_.borrow_from(outputs),
                        states_.borrow_from(states)};
    if (!releases_) {
      return recorder_.step(data);
    }
    py::gil_scoped_release release;
    return recorder_.step(data);
  }

  void restart(py::handle observation) { recorder_.restart(observation_.borrow_from(observation)); }
  void reset(py::handle observation) { recorder_.reset(observation_.borrow_from(observation)); }

  Recorder& recorder() { return recorder_; }

 private:
  py::object held_[4];  // keeps the memory that the recorder reads and writes
  Recorder recorder_;
  Views observation_;
  Views outputs_;
  Views states_;
  bool releases_;
};

// The recorder's own flags, seen through an array that keeps the recorder.
py::array_t<bool> done_of(const py::object& self) {
  const auto done = self.cast<BoundRecorder&>().recorder().done();
  const auto* data = reinterpret_cast<const bool*>(done.data());
  return py::array_t<bool>(static_cast<py::ssize_t>(done.size()), data, self);
}

std::vector<py::tuple> take_episodes(BoundRecorder& self) {
  std::vector<py::tuple> result;
  for (const Episode& episode : self.recorder().take_episodes()) {
    result.push_back(py::make_tuple(episode.env, episode.total_reward, episode.length));
  }
  return result;
}

}  // namespace

void bind_recorder(py::module_& module) {
  py::class_<RolloutControl>(module, "RolloutControl", "What others do to and see of a rollout.")
      .def(py::init<SharedNumber, std::uint64_t, std::int64_t, SharedNumber>(),
           py::arg("stop") = nullptr, py::arg("number") = 0, py::arg("min_steps") = 1,
           py::arg("steps") = nullptr)
      .def_property_readonly("is_stopped", &RolloutControl::is_stopped)
      .def("count_step", &RolloutControl::count_step);

  py::class_<BoundRecorder>(module, "Recorder", "Writes the steps of P envs into a slab.")
      .def(py::init([](const Layout& layout, const std::vector<py::tuple>& observations,
                       const std::vector<py::tuple>& outputs, std::int64_t envs, bool batched,
                       std::int64_t max_frames_per_traj, bool skips_after_done, bool own_flags,
                       bool set_truncated, const std::vector<py::tuple>& states,
                       const py::object& is_init, const py::object& step_count) {
             return std::make_unique<BoundRecorder>(
                 layout, observations, outputs,
                 RecorderOptions{envs, batched, max_frames_per_traj, skips_after_done, own_flags,
                                 set_truncated},
                 states, is_init, step_count);
           }),
           py::arg("layout"), py::arg("observations"), py::arg("outputs"), py::arg("envs"),
           py::arg("batched"), py::arg("max_frames_per_traj") = 0,
           py::arg("skips_after_done") = false, py::arg("own_flags") = false,
           py::arg("set_truncated") = false, py::arg("states") = py::tuple(),
           py::arg("is_init") = py::none(), py::arg("step_count") = py::none())
      .def_property_readonly("done", &done_of, "bool [P]: must be reset now; changes in place.")
      .def_property_readonly("frames", [](BoundRecorder& self) { return self.recorder().frames(); })
      .def("restart", &BoundRecorder::restart, py::arg("observation"))
      .def(
          "begin",
          [](BoundRecorder& self, std::shared_ptr<Slab> slab, std::int64_t row,
             std::int64_t version, RolloutControl control, std::int64_t steps) {
            self.recorder().begin(std::move(slab), row, version, std::move(control), steps);
          },
          py::arg("slab"), py::arg("row"), py::arg("policy_version"),
          py::arg("control") = RolloutControl(), py::arg("steps") = 0)
      .def("step", &BoundRecorder::step, py::arg("observation"), py::arg("reward"),
           py::arg("terminated"), py::arg("truncated"), py::arg("outputs"),
           py::arg("states") = py::tuple())
      .def("reset", &BoundRecorder::reset, py::arg("observation"))
      .def(
          "finish",
          [](BoundRecorder& self, std::int64_t worker, std::int64_t incarnation,
             std::int64_t sequence) {
            return self.recorder().finish(worker, incarnation, sequence);
          },
          py::arg("worker"), py::arg("incarnation"), py::arg("sequence"))
      .def("abandon", [](BoundRecorder& self) { self.recorder().abandon(); })
      .def("take_episodes", &take_episodes, "Ended episodes: (env, return, length) each.");
}

}  // namespace pycollect::python
