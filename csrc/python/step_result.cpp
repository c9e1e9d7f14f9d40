#include "step_result.h"

#include <stdexcept>
#include <string>

namespace pycollect::python {
namespace {

std::string expected_values(std::size_t count) {
  return "step: expected " + std::to_string(count) +
         " values (observation, reward, terminated, truncated, info), got ";
}

}  // namespace

py::tuple step_result(const py::object& returned, std::size_t expected) {
  if (PySequence_Check(returned.ptr()) == 0) {
    throw py::type_error(expected_values(expected) + Py_TYPE(returned.ptr())->tp_name);
  }
  py::tuple result(returned);  // the same object if it is already a tuple
  if (result.size() != expected) {
    throw std::invalid_argument(expected_values(expected) + std::to_string(result.size()) +
                                "; if the environment uses Gym's old interface, wrap it for " +
                                "Gymnasium");
  }
  return result;
}

}  // namespace pycollect::python
