#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "bindings.h"
#include "borrow.h"
#include "compiled_env.h"
#include "interop.h"
#include "pycollect/recorder.h"
#include "pycollect/slab.h"
#include "step_result.h"

namespace pycollect::python {
namespace {

// Views of a tuple of arrays, or of one array. Reuses its memory.
class Views {
 public:
  Views(std::size_t size, const char* what) : views_(size), borrowers_(size), what_(what) {}

  std::span<const ConstTensorView> borrow_from(py::handle arrays) {
    if (!py::isinstance<py::tuple>(arrays)) {
      return borrow_one(arrays);
    }
    const auto tuple = py::reinterpret_borrow<py::tuple>(arrays);
    if (tuple.size() != views_.size()) {
      throw std::invalid_argument(std::string(what_) + ": expected " +
                                  std::to_string(views_.size()) + " arrays, got " +
                                  std::to_string(tuple.size()));
    }
    return borrow_from(tuple, 0);
  }

  // Borrows one array per view from the tuple, beginning with entry `first`.
  std::span<const ConstTensorView> borrow_from(const py::tuple& tuple, std::size_t first) {
    for (std::size_t i = 0; i < views_.size(); ++i) {
      views_[i] = borrowers_[i](tuple[first + i], what_);
    }
    return views_;
  }

  // Whether there is one view, and the array differs from the last one only in its address.
  bool is_like(py::handle array) {
    return borrowers_.size() == 1 && borrowers_[0].is_like_array(array);
  }

  // Borrows the entries of a dict with these keys, if each is an array like the last one or an
  // integer. Otherwise returns false; the views are then those of other values.
  bool borrow_entries(py::handle dict, const std::vector<py::object>& keys) {
    if (keys.size() != views_.size() || !PyDict_CheckExact(dict.ptr())) {
      return false;
    }
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const py::handle entry = PyDict_GetItemWithError(dict.ptr(), keys[i].ptr());
      if (!entry) {
        if (PyErr_Occurred() != nullptr) {
          throw py::error_already_set();
        }
        return false;
      }
      const ConstTensorView& last = views_[i];
      const bool is_integer =
          PyLong_CheckExact(entry.ptr()) && last.rank() == 0 && last.dtype == DType::int64;
      if (!borrowers_[i].is_like_array(entry) && !is_integer) {
        return false;
      }
      views_[i] = borrowers_[i](entry, what_);
    }
    return true;
  }

  std::span<const ConstTensorView> views() const { return views_; }

 private:
  std::span<const ConstTensorView> borrow_one(py::handle array) {
    if (views_.size() != 1) {
      throw std::invalid_argument(std::string(what_) + ": expected a tuple of " +
                                  std::to_string(views_.size()) + " arrays, got one array");
    }
    views_[0] = borrowers_[0](array, what_);
    return views_;
  }

  std::vector<ConstTensorView> views_;
  std::vector<Borrower> borrowers_;
  const char* what_;
};

// From this number of bytes per step, releasing the GIL (60 ns) pays off.
constexpr std::int64_t kReleaseFrom = 64 << 10;

std::int64_t step_bytes(const Layout& layout, std::int64_t envs) {
  std::int64_t bytes = 0;
  for (const Leaf& leaf : layout.leaves()) {
    bytes += leaf.frame_bytes() * envs;
  }
  return bytes;
}

bool is_among(const Key& key, const std::vector<Key>& keys) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

void check_among(const char* name, const std::vector<Key>& keys, const std::vector<Key>& known) {
  for (const Key& key : keys) {
    if (!is_among(key, known)) {
      throw std::invalid_argument(std::string(name) + ": expected keys of observations, got " +
                                  to_string(key));
    }
  }
}

// Each tuple is (key, current, live). `current` is None for observations that are not carried.
std::vector<ObservationSpec> observation_specs(const std::vector<py::tuple>& observations,
                                               const std::vector<Key>& ends,
                                               const std::vector<Key>& rewards) {
  std::vector<ObservationSpec> result;
  std::vector<Key> known;
  for (const py::tuple& spec : observations) {
    const bool carried = !spec[1].is_none();
    const TensorView current = carried ? borrow(spec[1], "current", nullptr, true) : TensorView{};
    const Key key = key_from(spec[0]);
    const Meaning meaning = is_among(key, ends)      ? Meaning::end
                            : is_among(key, rewards) ? Meaning::reward
                                                     : Meaning::none;
    result.push_back({key, current, spec[2].cast<bool>(), carried, meaning});
    known.push_back(key);
  }
  check_among("ends", ends, known);
  check_among("rewards", rewards, known);
  return result;
}

// Each tuple is (key, current, initial, recorded).
std::vector<StateSpec> state_specs(const std::vector<py::tuple>& states) {
  std::vector<StateSpec> result;
  for (const py::tuple& spec : states) {
    result.push_back({key_from(spec[0]), borrow(spec[1], "current", nullptr, true),
                      borrow(spec[2], "initial"), spec[3].cast<bool>()});
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

// Whether the reward of a frame is one number, or is not written by the recorder.
bool has_one_reward(const Layout& layout) {
  const int index = layout.find({"next", "reward"});
  return index < 0 || layout[static_cast<std::size_t>(index)].frame_bytes() == sizeof(float);
}

class BoundRecorder {
 public:
  BoundRecorder(const Layout& layout, const std::vector<py::tuple>& observations,
                const std::vector<py::tuple>& outputs, const RecorderOptions& options,
                const std::vector<py::tuple>& states, const py::object& is_init,
                const py::object& step_count, std::vector<std::size_t> given, bool scalars,
                py::object convert, const std::vector<py::tuple>& elsewhere,
                const std::vector<py::tuple>& ends, const std::vector<py::tuple>& rewards,
                std::vector<py::object> names)
      : held_{py::cast(observations), py::cast(states), is_init, step_count},
        recorder_(layout, observation_specs(observations, keys_from(ends), keys_from(rewards)),
                  keys_from(outputs), options, state_specs(states),
                  optional_view(is_init, "is_init"), optional_view(step_count, "step_count"),
                  keys_from(elsewhere)),
        observation_(observations.size(), "observation"),
        last_(observations.size(), "observation"),
        outputs_(outputs.size(), "outputs"),
        states_(states.size(), "states"),
        given_(std::move(given)),
        scalars_(scalars),
        convert_(std::move(convert)),
        names_(std::move(names)),
        is_one_(options.envs == 1 && has_one_reward(layout)),
        own_flags_(!ends.empty()),
        releases_(step_bytes(layout, options.envs) >= kReleaseFrom) {}

  // Keeps the policy's outputs until their step is recorded, and returns copies of the
  // environment's inputs among them. Environments may keep their actions, so each copy has its own
  // memory.
  py::object take(const py::tuple& values) {
    borrow_values(values);
    taken_ = values;
    if (given_.size() == 1) {
      return copied(values, given_[0]);
    }
    py::tuple copies(given_.size());
    for (std::size_t i = 0; i < given_.size(); ++i) {
      copies[i] = copied(values, given_[i]);
    }
    return copies;
  }

  std::int64_t step(py::handle observation, py::handle reward, py::handle terminated,
                    py::handle truncated, py::handle outputs, py::handle states) {
    outputs_.borrow_from(outputs);
    states_.borrow_from(states);
    return step_of(observation_.borrow_from(observation), reward, terminated, truncated);
  }

  // Records the environment's result for the outputs of the last take().
  std::int64_t record(const py::object& returned) {
    const py::tuple result = step_result(returned, convert_.is_none() ? 4 : 5);
    if (!taken_) {
      throw std::logic_error("record: call take() first");
    }
    const py::object kept = std::exchange(taken_, py::object());
    py::object observation = result[0];
    if (!names_.empty() && observation_.borrow_entries(observation, names_)) {
      return step_of(observation_.views(), result[1], result[2], result[3]);
    }
    if (!convert_.is_none() && !observation_.is_like(observation)) {
      observation = convert_(observation);
    }
    return step_of(observation_.borrow_from(observation), result[1], result[2], result[3]);
  }

  // Whether a library raises such an exception for an array that it cannot export.
  static bool is_of_conversion(const py::error_already_set& error) {
    return error.matches(PyExc_TypeError) || error.matches(PyExc_ValueError) ||
           error.matches(PyExc_BufferError) || error.type().ptr() == PyExc_RuntimeError;
  }

  // Records the values of environments that reset themselves in the same step, for the outputs of
  // the last take(). `last` is None if there are no last observations. Returns nullopt and records
  // nothing if an array needs a conversion; then call record().
  std::optional<std::int64_t> record_autoreset(py::handle observation, py::handle reward,
                                               py::handle terminated, py::handle truncated,
                                               py::handle last) {
    if (!taken_) {
      throw std::logic_error("record_autoreset: call take() first");
    }
    StepData data{{}, {}, {}, {}, outputs_.views(), states_.views()};
    std::span<const ConstTensorView> finals;
    try {
      data.observation = observation_.borrow_from(observation);
      data.reward = reward_(reward, "reward");
      data.terminated = terminated_(terminated, "terminated");
      data.truncated = truncated_(truncated, "truncated");
      if (!last.is_none()) {
        finals = last_.borrow_from(last);
      }
    } catch (const py::builtin_exception&) {  // record() raises an error that helps
      return std::nullopt;
    } catch (const std::invalid_argument&) {
      return std::nullopt;
    } catch (const py::error_already_set& error) {
      if (!is_of_conversion(error)) {  // of a signal handler, for example
        throw;
      }
      return std::nullopt;
    }
    const auto step = [&] { return recorder_.step_autoreset(data, finals); };
    const auto result = released(step);
    if (result) {
      taken_ = py::object();
    }
    return result;
  }

  // Takes the outputs, steps the environments, records the step, and resets finished environments.
  std::int64_t step_env(CompiledEnv& env, const py::tuple& values) {
    borrow_values(values);
    return env.step(recorder_, given_, outputs_.views(), states_.views());
  }

  void abandon() {
    taken_ = py::object();
    recorder_.abandon();
  }

  void restart(py::handle observation) { recorder_.restart(observation_.borrow_from(observation)); }
  void reset(py::handle observation) { recorder_.reset(observation_.borrow_from(observation)); }

  Recorder& recorder() { return recorder_; }

 private:
  void borrow_values(const py::tuple& values) {
    taken_ = py::object();
    const std::size_t expected = outputs_.views().size() + states_.views().size();
    if (values.size() < expected) {
      throw std::invalid_argument("values: expected at least " + std::to_string(expected) +
                                  " arrays, got " + std::to_string(values.size()));
    }
    outputs_.borrow_from(values, 0);
    states_.borrow_from(values, outputs_.views().size());
  }

  py::object copied(const py::tuple& values, std::size_t place) {
    py::object array = copied_array(values, place);
    return scalars_ ? py::object(array[py::tuple()]) : array;
  }

  py::object copied_array(const py::tuple& values, std::size_t place) {
    const auto outputs = outputs_.views(), states = states_.views();
    if (place < outputs.size()) {
      return copied_to_numpy(outputs[place], "outputs");
    }
    if (place < outputs.size() + states.size()) {
      return copied_to_numpy(states[place - outputs.size()], "states");
    }
    return copied_to_numpy(borrow(values[place], "values"), "values");
  }

  std::int64_t step_of(std::span<const ConstTensorView> observed, py::handle reward,
                       py::handle terminated, py::handle truncated) {
    const auto outputs = outputs_.views(), states = states_.views();
    if (own_flags_) {
      return recorded(StepData{observed, {}, {}, {}, outputs, states});
    }
    const auto number = plain_number(reward);
    const auto end = plain_flag(terminated), cut = plain_flag(truncated);
    if (is_one_ && number && end && cut) {
      return recorded(OneStep{observed, *number, *end, *cut, outputs, states});
    }
    const py::object rewards = sequence_as_array(reward);
    return recorded(StepData{observed, reward_(rewards, "reward"),
                             terminated_(terminated, "terminated"),
                             truncated_(truncated, "truncated"), outputs, states});
  }

  template <typename Data>
  std::int64_t recorded(const Data& data) {
    return released([&] { return recorder_.step(data); });
  }

  // Calls a function, without the GIL if it moves much data.
  template <typename Function>
  std::invoke_result_t<Function> released(const Function& function) {
    if (!releases_) {
      return function();
    }
    py::gil_scoped_release release;
    return function();
  }

  py::object held_[4];  // keeps the memory that the recorder reads and writes
  Recorder recorder_;
  Views observation_, last_;
  Views outputs_;
  Views states_;
  std::vector<std::size_t> given_;
  bool scalars_;
  py::object convert_;
  std::vector<py::object> names_;
  py::object taken_;  // holds the memory of outputs_ and states_
  Borrower reward_, terminated_, truncated_;
  bool is_one_;
  bool own_flags_;
  bool releases_;
};

// Flags of the recorder as an array that keeps the recorder alive.
py::array_t<bool> lent(std::span<const std::uint8_t> flags, const py::object& self) {
  const auto* data = reinterpret_cast<const bool*>(flags.data());
  return py::array_t<bool>(static_cast<py::ssize_t>(flags.size()), data, self);
}

py::array_t<bool> done_of(const py::object& self) {
  return lent(self.cast<BoundRecorder&>().recorder().done(), self);
}

py::array_t<bool> behind_of(const py::object& self) {
  return lent(self.cast<BoundRecorder&>().recorder().behind(), self);
}

std::vector<Recorder*> recorders(const std::vector<BoundRecorder*>& bound) {
  std::vector<Recorder*> result;
  for (BoundRecorder* own : bound) {
    if (own == nullptr) {
      throw py::type_error("beside: expected recorders, got None");
    }
    result.push_back(&own->recorder());
  }
  return result;
}

std::vector<py::tuple> take_episodes(BoundRecorder& self) {
  std::vector<py::tuple> result;
  for (const Episode& episode : self.recorder().take_episodes()) {
    const py::object returned = episode.objectives.empty()
                                    ? py::object(py::float_(episode.total_reward))
                                    : py::cast(episode.objectives);
    result.push_back(py::make_tuple(episode.env, returned, episode.length));
  }
  return result;
}

}  // namespace

void bind_recorder(py::module_& module) {
  py::class_<RolloutControl>(module, "RolloutControl", "Lets others stop and follow a rollout.")
      .def(py::init<RolloutControl::Number, std::uint64_t, std::int64_t, RolloutControl::Number>(),
           py::arg("stop") = nullptr, py::arg("number") = 0, py::arg("min_steps") = 1,
           py::arg("steps") = nullptr)
      .def_property_readonly("is_stopped", &RolloutControl::is_stopped)
      .def_readonly("min_steps", &RolloutControl::min_steps)
      .def("count_step", &RolloutControl::count_step);

  py::class_<BoundRecorder>(module, "Recorder", "Writes steps into a slab.")
      .def(py::init([](const Layout& layout, const std::vector<py::tuple>& observations,
                       const std::vector<py::tuple>& outputs, std::int64_t envs, bool batched,
                       std::int64_t max_frames_per_traj, bool skips_after_done, bool set_truncated,
                       const std::vector<py::tuple>& states, const py::object& is_init,
                       const py::object& step_count, std::vector<std::size_t> given, bool scalars,
                       py::object convert, const std::vector<py::tuple>& elsewhere,
                       const std::vector<py::tuple>& ends, const std::vector<py::tuple>& rewards,
                       bool leaves_out_dummies, std::int64_t all_envs, std::int64_t first_env,
                       std::vector<py::object> names) {
             return std::make_unique<BoundRecorder>(
                 layout, observations, outputs,
                 RecorderOptions{envs, all_envs, first_env, batched, max_frames_per_traj,
                                 skips_after_done, leaves_out_dummies, set_truncated},
                 states, is_init, step_count, std::move(given), scalars, std::move(convert),
                 elsewhere, ends, rewards, std::move(names));
           }),
           py::arg("layout"), py::arg("observations"), py::arg("outputs"), py::arg("envs"),
           py::arg("batched"), py::arg("max_frames_per_traj") = 0,
           py::arg("skips_after_done") = false, py::arg("set_truncated") = false,
           py::arg("states") = py::tuple(), py::arg("is_init") = py::none(),
           py::arg("step_count") = py::none(), py::arg("given") = py::tuple(),
           py::arg("scalars") = false, py::arg("convert") = py::none(),
           py::arg("elsewhere") = py::tuple(), py::arg("ends") = py::tuple(),
           py::arg("rewards") = py::tuple(), py::arg("leaves_out_dummies") = false,
           py::arg("all_envs") = 0, py::arg("first_env") = 0,
           py::arg("names") = std::vector<py::object>())
      .def_property_readonly("done", &done_of, "bool [P]: must be reset now; changes in place.")
      .def_property_readonly("behind", &behind_of,
                             "bool [P]: the rollout lacks frames of it; changes in place.")
      .def_property_readonly("steps_left",
                             [](BoundRecorder& self) { return self.recorder().steps_left(); })
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
      .def(
          "set_policy_version",
          [](BoundRecorder& self, std::int64_t version) {
            self.recorder().set_policy_version(version);
          },
          py::arg("version"))
      .def(
          "stop",
          [](BoundRecorder& self, const std::vector<BoundRecorder*>& beside) {
            return self.recorder().stop(recorders(beside));
          },
          py::arg("beside"))
      .def("take", &BoundRecorder::take, py::arg("values"))
      .def("record", &BoundRecorder::record, py::arg("result"))
      .def("record_autoreset", &BoundRecorder::record_autoreset, py::arg("observation"),
           py::arg("reward"), py::arg("terminated"), py::arg("truncated"), py::arg("last"))
      .def("step_env", &BoundRecorder::step_env, py::arg("env"), py::arg("values"))
      .def("step", &BoundRecorder::step, py::arg("observation"), py::arg("reward"),
           py::arg("terminated"), py::arg("truncated"), py::arg("outputs"),
           py::arg("states") = py::tuple())
      .def("reset", &BoundRecorder::reset, py::arg("observation"))
      .def(
          "finish",
          [](BoundRecorder& self, std::int64_t worker, std::int64_t incarnation,
             std::int64_t sequence, const std::vector<BoundRecorder*>& beside) {
            return self.recorder().finish({worker, incarnation, sequence}, recorders(beside));
          },
          py::arg("worker"), py::arg("incarnation"), py::arg("sequence"),
          py::arg("beside") = py::tuple())
      .def("abandon", &BoundRecorder::abandon)
      .def("take_episodes", &take_episodes,
           "Return (env, return, length) per episode; the return of several objectives is a list.");
}

}  // namespace pycollect::python
