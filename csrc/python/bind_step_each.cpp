#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings.h"
#include "borrow.h"
#include "pycollect/copy.h"
#include "step_result.h"

namespace pycollect::python {
namespace {

constexpr const char* kSeveralRewards =
    "; for a vector of rewards, give the environment a reward_space, a Box of shape [k]";

// Steps environments one after the other. Each result is copied before the next environment steps,
// because environments may share the memory of their observations.
class StepEach {
 public:
  StepEach(std::vector<py::object> steps, std::vector<py::object> convert, py::object to_action,
           py::array observations, py::ssize_t objectives)
      : steps_(std::move(steps)),
        convert_(std::move(convert)),
        to_action_(std::move(to_action)),
        rows_(borrow(observations, "observations", nullptr, true)),
        observation_(steps_.size()),
        reward_(shape_of_rewards(steps_.size(), objectives)),
        terminated_(static_cast<py::ssize_t>(steps_.size())),
        truncated_(static_cast<py::ssize_t>(steps_.size())),
        rewards_(reward_.mutable_data()),
        objectives_(objectives),
        ends_(terminated_.mutable_data()),
        cuts_(truncated_.mutable_data()),
        results_(py::make_tuple(std::move(observations), reward_, terminated_, truncated_)) {
    const auto count = static_cast<std::int64_t>(steps_.size());
    if (convert_.size() != steps_.size() || rows_.rank() < 1 || rows_.shape[0] != count) {
      throw std::invalid_argument("convert, observations: expected one entry for each of " +
                                  std::to_string(count) + " environments, got " +
                                  std::to_string(convert_.size()) + " and shape " +
                                  to_string(rows_.shape));
    }
  }

  py::tuple step(const py::object& actions) {
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      record(i, step_result(steps_[i](action(actions, i)), 5));
    }
    return results_;
  }

  // Reports references to Python's garbage collector: an environment may hold this object.
  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(to_action_.ptr());
    for (const auto* objects : {&steps_, &convert_}) {
      for (const py::object& object : *objects) {
        Py_VISIT(object.ptr());
      }
    }
    return 0;
  }

  void clear() {
    steps_.clear();
    convert_.clear();
    to_action_ = py::none();
  }

 private:
  // [P], or [P, k] for k rewards per environment.
  static std::vector<py::ssize_t> shape_of_rewards(std::size_t envs, py::ssize_t objectives) {
    std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(envs)};
    if (objectives > 1) {
      shape.push_back(objectives);
    }
    return shape;
  }

  py::object action(const py::object& actions, std::size_t i) {
    if (to_action_.is_none()) {
      return actions[py::int_(i)];
    }
    return to_action_(actions[py::make_tuple(i, py::ellipsis())]);  // never a scalar
  }

  void record(std::size_t i, const py::tuple& result) {
    store(i, result[0]);
    store_reward(i, result[1]);
    const auto end = plain_flag(result[2]), cut = plain_flag(result[3]);
    ends_[i] = end ? *end : single<bool>(result[2], "terminated");
    cuts_[i] = cut ? *cut : single<bool>(result[3], "truncated");
  }

  void store_reward(std::size_t i, py::handle given) {
    if (objectives_ == 1) {
      const auto number = plain_number(given);
      rewards_[i] = number ? *number : single<double>(sequence_as_array(given), "reward");
      return;
    }
    const py::object rewards = sequence_as_array(given);
    ScalarRoom room;
    const TensorView view = borrow(rewards, "reward", &room);
    if (view.shape != Dims{objectives_}) {
      throw std::invalid_argument("reward: expected shape " + to_string(Dims{objectives_}) +
                                  " from environment " + std::to_string(i) +
                                  ", which its reward_space declares, got shape " +
                                  to_string(view.shape));
    }
    copy(TensorView::contiguous(rewards_ + static_cast<py::ssize_t>(i) * objectives_,
                                DType::float64, view.shape),
         view);
  }

  void store(std::size_t i, py::object observation) {
    if (!observation_[i].is_like_array(observation)) {
      observation = convert_[i](observation);
    }
    copy(rows_[static_cast<std::int64_t>(i)], observation_[i](observation, "observation"));
  }

  // The value of a number, or of an array of one element.
  template <typename T>
  static T single(py::handle object, const char* what) {
    ScalarRoom room;
    TensorView view = borrow(object, what, &room);
    if (view.count() != 1) {
      throw std::invalid_argument(std::string(what) + ": expected one number, got an array of " +
                                  std::to_string(view.count()) +
                                  (std::string_view(what) == "reward" ? kSeveralRewards : ""));
    }
    T value{};
    view.shape = view.strides = Dims{};
    constexpr DType dtype = std::is_same_v<T, bool> ? DType::boolean : DType::float64;
    copy(TensorView::contiguous(&value, dtype, Dims{}), view);
    return value;
  }

  std::vector<py::object> steps_;
  std::vector<py::object> convert_;
  py::object to_action_;
  TensorView rows_;
  std::vector<Borrower> observation_;
  py::array_t<double> reward_;
  py::array_t<bool> terminated_, truncated_;
  double* rewards_;
  py::ssize_t objectives_;  // rewards per environment
  bool *ends_, *cuts_;
  py::tuple results_;  // holds these arrays
};

// The StepEach of a Python object, or null during its construction. The garbage collector may run
// then, and a cast would return uninitialized memory.
StepEach* made(PyObject* self) {
  const auto held = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
  return held.holder_constructed() ? held.value_ptr<StepEach>() : nullptr;
}

}  // namespace

void bind_step_each(py::module_& module) {
  const py::custom_type_setup collected([](PyHeapTypeObject* heap_type) {
    PyTypeObject& type = heap_type->ht_type;
    type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      const StepEach* own = made(self);
      return own == nullptr ? 0 : own->traverse(visit, arg);
    };
    type.tp_clear = [](PyObject* self) {
      if (StepEach* own = made(self)) {
        own->clear();
      }
      return 0;
    };
  });
  py::class_<StepEach>(module, "StepEach", collected, "Steps environments one after the other.")
      .def(py::init<std::vector<py::object>, std::vector<py::object>, py::object, py::array,
                    py::ssize_t>(),
           py::arg("steps"), py::arg("convert"), py::arg("to_action"), py::arg("observations"),
           py::arg("objectives") = 1)
      .def("__call__", &StepEach::step, py::arg("actions"));
}

}  // namespace pycollect::python
