// Collector: workers on threads, each with its environments and its policy, whose rollouts become
// batches. No frame is copied on its way: every worker records into its rows of the batch.
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
#include "pycollect/detail/collection.h"
#include "pycollect/env.h"
#include "pycollect/version.h"
#include "pycollect/worker_error.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Collects from environments of type E, an Env or an EnvBatch.
//
// The policy chooses actions for all environments of a worker at once, in one of two forms:
//
//     void operator()(std::span<const Number> observations, std::span<Action> actions);
//
// for an Env: P observations, one after the other, and room for P actions; or, for any,
//
//     std::vector<Leaf> outputs() const;  // if any besides the actions: log-probabilities, values
//     void operator()(std::span<const ConstTensorView> observations,
//                     std::span<const TensorView> outputs);
//
// with arrays [P, *shape]: of `outputs` the actions first, then what outputs() names, which become
// leaves of the batch. Each worker has a copy of the policy, or all share one that is passed as
// std::ref, and is then called by all workers' threads. A copy is told a seed of its own, once,
// where it has `void seed(std::uint64_t)`.
//
// With Ready::all, next() asks all workers for a rollout and gives [W, P, T] when all are done. In
// between nobody collects, so that the policy may be changed; the thread in next() is worker 0's.
// With Ready::first, it gives [1, P, T] of the worker that is done first and asks that one again at
// once: workers collect beside whoever learns, and take a new policy by set_policy().
//
// The same seed gives the same batches with Ready::all. next(), set_policy() and ledger() may be
// called by any thread, and take turns. Environments are made here, in the constructor, and later
// used by their worker's thread alone.
template <typename E>
  requires(Env<E> || EnvBatch<E>)
class Collector {
 public:
  using Environments = typename detail::EnvironmentsOf<E>::type;

  // Environments from their type alone: E(seed) for an Env, E(envs, seed) for an EnvBatch. Seeds
  // follow each other over workers and environments, from options.seed on. What one of their
  // constructors throws comes as WorkerError; std::invalid_argument where options or leaves do not
  // fit.
  template <typename Policy>
  Collector(CollectorOptions options, Policy policy)
      : Collector(options, std::move(policy), [options](std::int64_t worker) {
          const auto first = static_cast<std::uint64_t>(worker * options.envs);
          return Environments(options.envs, options.seed + first);
        }) {}

  // make(worker) gives that worker's environments: an EnvBatch, or Each<E>, of options.envs.
  template <typename Policy, typename Make>
    requires std::same_as<std::invoke_result_t<Make&, std::int64_t>, Environments>
  Collector(CollectorOptions options, Policy policy, Make make)
      : collection_(std::make_unique<detail::Collection>(
            options,
            [&make](std::int64_t worker) {
              return std::make_unique<detail::Wrapped<Environments>>(make(worker));
            },
            detail::policy_of<E>(std::move(policy)))) {}

  // The next batch. Throws WorkerError where an environment or the policy of a worker threw: its
  // rollout is lost, its environments are reset before the next one, and what others had collected
  // is delivered later. Throws std::logic_error after stop().
  Batch next() { return collection_->next(); }

  // From each worker's next rollout on, which has a policy version greater by one. Throws
  // std::invalid_argument where its outputs are not those of the policy before.
  template <typename Policy>
  void set_policy(Policy policy) {
    collection_->set_policy(detail::policy_of<E>(std::move(policy)));
  }

  // What became of every frame that was asked for: issued = delivered + in flight + lost, at every
  // moment. Of all workers, or of one.
  Ledger ledger() const { return collection_->ledger(); }
  Ledger ledger(std::int64_t worker) const { return collection_->ledger(worker); }

  // Ends the workers, each after its current step; what is in flight is lost. Batches stay. Done by
  // the destructor, too.
  void stop() { collection_->stop(); }

  // What a batch consists of.
  const Layout& layout() const { return collection_->layout(); }

 private:
  std::unique_ptr<detail::Collection> collection_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
