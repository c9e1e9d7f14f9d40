#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "bindings.h"
#include "borrow.h"
#include "pycollect/copy.h"
#include "step_result.h"

namespace pycollect::python {
namespace {

// Steps environments one after the other. Each result is copied before the next environment steps:
// they may share the memory in which they show their observations.
class StepEach {
 public:
  StepEach(std::vector<py::object> steps, std::vector<py::object> convert, py::object to_action,
           py::array observations)
      : steps_(std::move(steps)),
        convert_(std::move(convert)),
        to_action_(std::move(to_action)),
        rows_(borrow(observations, "observations", nullptr, true)),
        observation_(steps_.size()),
        reward_(static_cast<py::ssize_t>(steps_.size())),
        terminated_(static_cast<py::ssize_t>(steps_.size())),
        truncated_(static_cast<py::ssize_t>(steps_.size())),
        rewards_(reward_.mutable_data()),
        ends_(terminated_.mutable_data()),
        cuts_(truncated_.mutable_data()),
        results_(py::make_tuple(std::move(observations), reward_, terminated_, truncated_)) {
    const auto count = static_cast<std::int64_t>(steps_.size());
    if (convert_.size() != steps_.size() || rows_.rank() < 1 || rows_.shape[0] != count) {
      throw std::invalid_argument("convert, observations: expected as many as steps, " +
                                  std::to_string(count));
    }
  }

  py::tuple step(const py::object& actions) {
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      record(i, step_result(steps_[i](action(actions, i)), 5));
    }
    return results_;
  }

 private:
  py::object action(const py::object& actions, std::size_t i) {
    auto own = py::reinterpret_steal<py::object>(
        PySequence_GetItem(actions.ptr(), static_cast<Py_ssize_t>(i)));
    if (!own) {
      throw py::error_already_set();
    }
    return to_action_.is_none() ? own : to_action_(own);
  }

  void record(std::size_t i, const py::tuple& result) {
    store(i, result[0]);
    rewards_[i] = number(result[1]);
    ends_[i] = flag(result[2]);
    cuts_[i] = flag(result[3]);
  }

  void store(std::size_t i, py::object observation) {
    if (!observation_[i].is_like_array(observation)) {
      observation = convert_[i](observation);
    }
    copy(rows_[static_cast<std::int64_t>(i)], observation_[i](observation, "observation"));
  }

  static double number(py::handle value) {
    if (const auto plain = plain_number(value)) {
      return *plain;
    }
    const double result = PyFloat_AsDouble(value.ptr());
    if (result == -1.0 && PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    return result;
  }

  static bool flag(py::handle value) {
    if (const auto plain = plain_flag(value)) {
      return *plain;
    }
    const int result = PyObject_IsTrue(value.ptr());
    if (result < 0) {
      throw py::error_already_set();
    }
    return result != 0;
  }

  std::vector<py::object> steps_;
  std::vector<py::object> convert_;
  py::object to_action_;
  TensorView rows_;
  std::vector<Borrower> observation_;
  py::array_t<double> reward_;
  py::array_t<bool> terminated_, truncated_;
  double* rewards_;
  bool *ends_, *cuts_;
  py::tuple results_;  // holds all of these
};

}  // namespace

void bind_step_each(py::module_& module) {
  py::class_<StepEach>(module, "StepEach", "Steps environments one after the other.")
      .def(py::init<std::vector<py::object>, std::vector<py::object>, py::object, py::array>(),
           py::arg("steps"), py::arg("convert"), py::arg("to_action"), py::arg("observations"))
      .def("__call__", &StepEach::step, py::arg("actions"));
}

}  // namespace pycollect::python
