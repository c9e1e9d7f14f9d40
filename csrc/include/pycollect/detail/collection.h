// Collection: the part of a Collector that does not depend on types, with workers and their
// threads.
#pragma once

#include <atomic>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "pycollect/batch.h"
#include "pycollect/collector_options.h"
#include "pycollect/detail/any_env_batch.h"
#include "pycollect/detail/stepped_envs.h"
#include "pycollect/env.h"
#include "pycollect/layout.h"
#include "pycollect/recorder.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI::detail {

// A worker's data for one rollout, without its policy.
struct Rollout {
  SteppedEnvs& environments;
  Recorder& recorder;
  std::span<const TensorView> outputs;       // of the policy: actions first
  std::span<const ConstTensorView> chosen;   // read-only views of `outputs`
  std::span<const ConstTensorView> actions;  // the first of `chosen`
  const std::atomic<bool>& stopping;
};

// Runs one worker's policy until the end of the rollout, and returns whether it got there. The
// function knows the types of the policy and the environments, so neither choosing actions nor
// stepping is a virtual call. AnyPolicy::make returns a Roll with a copy of the policy for one
// worker.
using Roll = std::function<bool(const Rollout&)>;
struct AnyPolicy {
  std::vector<Leaf> outputs;  // besides the actions
  std::function<Roll(std::uint64_t seed)> make;
};

template <typename Policy>
concept ChoosesByViews =
    std::invocable<Policy&, std::span<const ConstTensorView>, std::span<const TensorView>>;

template <typename E, typename Policy>
void act(Policy& policy, std::span<const ConstTensorView> observations,
         std::span<const TensorView> outputs) {
  if constexpr (ChoosesByViews<Policy>) {
    policy(observations, outputs);
  } else {
    static_assert(Env<E>, "a policy for an EnvBatch is called with views");
    using Number = typename E::Number;
    using Action = typename E::Action;
    const auto envs = static_cast<std::size_t>(observations[0].shape[0]);
    policy(std::span<const Number>(reinterpret_cast<const Number*>(observations[0].data),
                                   envs * E::kObservation),
           std::span<Action>(reinterpret_cast<Action*>(outputs[0].data), envs));
  }
}

template <typename E, typename Policy>
bool roll(Policy& policy, const Rollout& own) {
  SteppedEnvs& environments = own.environments;
  Recorder& recorder = own.recorder;
  auto& batch = environments.as<typename EnvironmentsOf<E>::type>();
  // Copied: members would be reloaded after each write through a std::byte pointer.
  const std::span<const ConstTensorView> seen = environments.seen(), actions = own.actions;
  const std::span<const TensorView> outputs = own.outputs;
  environments.set_policy_data(own.chosen);
  environments.repeat(recorder);
  // Without a RolloutControl each step either is one of the rollout or throws, so steps are counted
  // here.
  for (std::int64_t left = recorder.steps_left(); left > 0; --left) {
    if (own.stopping.load(std::memory_order_relaxed)) {
      return false;
    }
    act<E>(policy, seen, outputs);
    environments.step_as(batch, actions);
    environments.record_again(recorder);
  }
  return true;
}

// Returns a copy with this seed. A shared policy is not seeded.
template <typename Policy>
Policy seeded(const Policy& policy, std::uint64_t seed) {
  Policy copy = policy;
  if constexpr (requires { copy.seed(seed); }) {
    copy.seed(seed);
  }
  return copy;
}

template <typename E, typename Policy>
AnyPolicy policy_of(Policy policy) {
  using Plain = std::unwrap_reference_t<Policy>;
  AnyPolicy result;
  if constexpr (requires(const Plain& plain) { plain.outputs(); }) {
    static_assert(ChoosesByViews<Plain>, "a policy with outputs() is called with views");
    result.outputs = static_cast<const Plain&>(policy).outputs();
  }
  result.make = [policy = std::move(policy)](std::uint64_t seed) -> Roll {
    return [mine = seeded(policy, seed)](const Rollout& rollout) mutable {
      return roll<E, Plain>(mine, rollout);
    };
  };
  return result;
}

class Collection {
 public:
  using MakeEnvironments = std::function<std::unique_ptr<AnyEnvBatch>(std::int64_t worker)>;

  Collection(const CollectorOptions& options, const MakeEnvironments& make, AnyPolicy policy);
  ~Collection();
  Collection(const Collection&) = delete;
  Collection& operator=(const Collection&) = delete;

  Batch next();
  void set_policy(AnyPolicy policy);
  Ledger ledger() const;
  Ledger ledger(std::int64_t worker) const;
  void stop();
  const Layout& layout() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI::detail
