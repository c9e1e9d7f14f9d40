// CompiledEnv: environments of another extension module, which exports them with python_env.h.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <vector>

#include "pycollect/detail/env_table.h"
#include "pycollect/detail/step_arrays.h"
#include "pycollect/detail/stepped_envs.h"
#include "pycollect/recorder.h"

namespace pycollect::python {

namespace py = pybind11;

// Environments in C++, stepped without the GIL. Their exceptions are raised as their own module
// translates them.
class CompiledEnv {
 public:
  // `owner` has the method that env_table.h describes. Throws ValueError if its module was compiled
  // against an incompatible python_env.h.
  explicit CompiledEnv(py::object owner);

  const detail::SteppedEnvs& envs() const { return envs_; }
  std::int64_t seeds() const { return seeds_; }
  const py::object& owner() const { return owner_; }

  void reset_all();
  void reset(std::span<const std::uint8_t> mask);
  // Actions [P, *shape] of any strides, in the order of their leaves.
  void step(std::span<const ConstTensorView> actions);
  // Steps, records and resets as detail::SteppedEnvs does. `given` are the positions of the actions
  // among the outputs.
  std::int64_t step(Recorder& recorder, const std::vector<std::size_t>& given,
                    std::span<const ConstTensorView> outputs,
                    std::span<const ConstTensorView> states);

 private:
  struct Description;
  explicit CompiledEnv(const Description& described, py::object owner);
  template <typename Call>
  void released(const Call& call);
  void take(std::size_t place, const ConstTensorView& action);

  py::object owner_;
  detail::SteppedEnvs envs_;
  std::int64_t seeds_;
  detail::StepArrays room_;  // for actions whose memory the environments cannot read
  std::vector<ConstTensorView> actions_;
};

}  // namespace pycollect::python
