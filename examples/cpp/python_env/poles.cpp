// poles: CartPole in C++, for the collectors of the Python package.
#include <pycollect/python_env.h>

#include "../cartpole.h"

PYBIND11_MODULE(poles, module) {
  module.doc() = "CartPole-v1 in C++.";
  // Random actions are drawn from it; without them it may be left out.
  const auto discrete = pybind11::module_::import("gymnasium.spaces").attr("Discrete");
  pycollect::python_env<CartPole>(module, "CartPole").attr("action_space") = discrete(2);
}
