// SteppedEnvs: an EnvBatch, the memory that it writes into, and the step that records it.
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

// One thread at a time. What the environments throw passes through.
class SteppedEnvs {
 public:
  // Throws std::invalid_argument where there is no environment in it.
  explicit SteppedEnvs(std::unique_ptr<AnyEnvBatch> environments);
  SteppedEnvs(const SteppedEnvs&) = delete;
  SteppedEnvs& operator=(const SteppedEnvs&) = delete;

  std::int64_t envs() const { return envs_; }
  const std::vector<Leaf>& observation_leaves() const { return observation_leaves_; }
  const std::vector<Leaf>& action_leaves() const { return action_leaves_; }

  // What the environments wrote last, the same memory each time: observations [P, *shape], float64
  // and bool [P].
  std::span<const TensorView> observations() const { return observations_.views(); }
  std::span<const ConstTensorView> seen() const { return seen_; }
  const TensorView& reward() const { return outcomes_[0]; }
  const TensorView& terminated() const { return outcomes_[1]; }
  const TensorView& truncated() const { return outcomes_[2]; }

  void reset_all();
  void reset(std::span<const std::uint8_t> mask);
  void step(std::span<const ConstTensorView> actions);

  // For a loop that knows the environments' type, which has to be theirs: their steps are no
  // virtual calls then.
  template <EnvBatch B>
  B& as() {
    return static_cast<Wrapped<B>&>(*environments_).batch();
  }
  template <EnvBatch B>
  void step_as(B& batch, std::span<const ConstTensorView> actions) {
    batch.step(actions, observations(), rewards_, terminated_, truncated_);
  }

  // What the policy gives with each step that is recorded from now on: `outputs` are all of it, the
  // actions among them. Both must stay until the last step that is recorded with them.
  void set_policy_data(std::span<const ConstTensorView> outputs,
                       std::span<const ConstTensorView> states = {}) {
    data_.outputs = outputs;
    data_.states = states;
  }

  // Records the step, after which environments whose episode ended are reset. Returns what
  // Recorder::step does; allocates nothing of its own.
  std::int64_t record(Recorder& recorder) { return recorded(recorder, recorder.step(data_)); }

  // The same where the policy writes into arrays that stay: repeat(), due after set_policy_data(),
  // looks at them once for all steps.
  void repeat(Recorder& recorder) { recorder.repeat(data_); }
  std::int64_t record_again(Recorder& recorder) {
    return recorded(recorder, recorder.step_again());
  }

 private:
  std::int64_t recorded(Recorder& recorder, std::int64_t due) {
    if (due != 0 && due != -1) {  // -1: it was stopped, and no environment has ended
      reset_done(recorder);
    }
    return due;
  }
  void reset_done(Recorder& recorder);

  std::unique_ptr<AnyEnvBatch> environments_;
  std::int64_t envs_;
  std::vector<Leaf> observation_leaves_, action_leaves_;
  StepArrays observations_, outcomes_;
  std::vector<ConstTensorView> seen_;  // the observations, as who reads them has them
  std::span<double> rewards_;          // the outcomes, as environments write them
  std::span<std::uint8_t> terminated_, truncated_;
  StepData data_;  // of all steps: they differ in the policy's part alone
};

}  // namespace pycollect::inline PYCOLLECT_ABI::detail
