// What a Collector is without its types: workers, their threads, and what they are asked for.
#pragma once

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
#include "pycollect/env.h"
#include "pycollect/layout.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI::detail {

// One worker's policy, and how each gets its own.
using Act = std::function<void(std::span<const ConstTensorView>, std::span<const TensorView>)>;
struct AnyPolicy {
  std::vector<Leaf> outputs;  // besides the actions
  std::function<Act(std::uint64_t seed)> make;
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

// A copy that was told its seed; one that all share is told none.
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
    result.outputs = static_cast<const Plain&>(policy).outputs();
  }
  result.make = [policy = std::move(policy)](std::uint64_t seed) -> Act {
    return [mine = seeded(policy, seed)](std::span<const ConstTensorView> observations,
                                         std::span<const TensorView> outputs) mutable {
      act<E, Plain>(mine, observations, outputs);
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
