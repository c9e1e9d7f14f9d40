// poles: CartPole in C++, for the collectors of the Python package.
#include <pycollect/python_env.h>

#include "../cartpole.h"

PYBIND11_MODULE(poles, module) {
  module.doc() = "CartPole-v1 in C++.";
  // Needed only for random actions, which are drawn from this space.
  const auto discrete = pybind11::module_::import("gymnasium.spaces").attr("Discrete");
  pycollect::python_env<CartPole>(module, "CartPole").attr("action_space") = discrete(2);
}
