#include "step_result.h"

#include <stdexcept>
#include <string>

namespace pycollect::python {

py::tuple step_result(const py::object& returned, std::size_t expected) {
  py::tuple result(returned);  // the same object where it is one
  if (result.size() != expected) {
    throw std::invalid_argument("the environment's step: expected " + std::to_string(expected) +
                                " values (observation, reward, terminated, truncated, info), got " +
                                std::to_string(result.size()));
  }
  return result;
}

}  // namespace pycollect::python
