// SteppedEnvs: an EnvBatch, the memory that it writes, and the recording of its steps.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pycollect/detail/any_env_batch.h"
#include "pycollect/detail/step_arrays.h"
#include "pycollect/layout.h"
#include "pycollect/recorder.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI::detail {

// For one thread at a time. Exceptions of the environments are passed on.
class SteppedEnvs {
 public:
  // Throws std::invalid_argument if it has no environments.
  explicit SteppedEnvs(std::unique_ptr<AnyEnvBatch> environments);
  SteppedEnvs(const SteppedEnvs&) = delete;
  SteppedEnvs& operator=(const SteppedEnvs&) = delete;

  std::int64_t envs() const { return envs_; }
  const std::vector<Leaf>& observation_leaves() const { return observation_leaves_; }
  const std::vector<Leaf>& action_leaves() const { return action_leaves_; }

  // The last results of the environments, at the same addresses each time: observations [P,
  // *shape], reward float64 [P] and flags bool [P].
  std::span<const TensorView> observations() const { return observations_.views(); }
  std::span<const ConstTensorView> seen() const { return seen_; }
  const TensorView& reward() const { return outcomes_[0]; }
  const TensorView& terminated() const { return outcomes_[1]; }
  const TensorView& truncated() const { return outcomes_[2]; }

  void reset_all();
  void reset(std::span<const std::uint8_t> mask);
  void step(std::span<const ConstTensorView> actions);

  // For a loop that knows the type of the environments, so that steps are not virtual calls. The
  // type must be right; it is not checked.
  template <EnvBatch B>
  B& as() {
    return static_cast<Wrapped<B>&>(*environments_).batch();
  }
  template <EnvBatch B>
  void step_as(B& batch, std::span<const ConstTensorView> actions) {
    batch.step(actions, observations(), rewards_, terminated_, truncated_);
  }

  // Sets the policy's data for the steps recorded from now on. `outputs` has all outputs, including
  // the actions. The arrays behind both must exist until the last step with them is recorded.
  void set_policy_data(std::span<const ConstTensorView> outputs,
                       std::span<const ConstTensorView> states = {}) {
    data_.outputs = outputs;
    data_.states = states;
  }

  // Records the step, then resets the environments with an ended episode. Returns the result of
  // Recorder::step(). Allocates nothing itself.
  std::int64_t record(Recorder& recorder) { return recorded(recorder, recorder.step(data_)); }

  // For a policy that writes into the same arrays at each step: repeat(), called after
  // set_policy_data(), checks them once for all calls of record_again().
  void repeat(Recorder& recorder) { recorder.repeat(data_); }
  std::int64_t record_again(Recorder& recorder) {
    return recorded(recorder, recorder.step_again());
  }

 private:
  std::int64_t recorded(Recorder& recorder, std::int64_t due) {
    if (due != 0 && due != -1) {  // -1: the rollout was stopped, and no episode ended
      reset_done(recorder);
    }
    return due;
  }
  void reset_done(Recorder& recorder);

  std::unique_ptr<AnyEnvBatch> environments_;
  std::int64_t envs_;
  std::vector<Leaf> observation_leaves_, action_leaves_;
  StepArrays observations_, outcomes_;
  std::vector<ConstTensorView> seen_;  // read-only views of the observations
  std::span<double> rewards_;          // the arrays in `outcomes_`, for the environments
  std::span<std::uint8_t> terminated_, truncated_;
  StepData data_;  // of all steps; only the policy's part changes
};

}  // namespace pycollect::inline PYCOLLECT_ABI::detail
