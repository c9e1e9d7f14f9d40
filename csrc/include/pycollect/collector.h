// Collector: workers on threads, each with its own environments and policy. Their rollouts form
// batches. Frames are not copied: each worker records directly into its rows of the batch.
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

// Collects from environments of type E, which is an Env or an EnvBatch.
//
// The policy chooses the actions of all environments of a worker at once. For an Env it may have
// this form, with P observations one after the other and space for P actions:
//
//     void operator()(std::span<const Number> observations, std::span<Action> actions);
//
// For both kinds it may have this form, with arrays [P, *shape]:
//
//     std::vector<Leaf> outputs() const;  // only if it has outputs besides the actions
//     void operator()(std::span<const ConstTensorView> observations,
//                     std::span<const TensorView> outputs);
//
// `outputs` holds the actions first, then the leaves that outputs() lists, such as
// log-probabilities or values. All of them become leaves of the batch.
//
// Each worker has a copy of the policy. If a copy has `void seed(std::uint64_t)`, it is called
// once, with a different seed for each copy. A policy passed as std::ref is shared instead: the
// threads of all workers call the same object.
//
// With Ready::all, next() asks all workers for a rollout and returns [W, P, T] when all have
// finished. The thread that calls next() runs worker 0. Between two calls no worker runs, so the
// policy may be changed. With Ready::first, next() returns [1, P, T] from the first worker that
// finishes, and starts this worker's next rollout at once. Workers therefore collect while the
// learner runs, and set_policy() gives them a new policy.
//
// With Ready::all, the same seed gives the same batches. Any thread may call next(), set_policy()
// and ledger(); concurrent calls run one after the other. Environments and the policy may call
// set_policy() and ledger(), but not next() or stop(). The constructor makes the environments;
// afterwards only their worker's thread uses them.
//
// Movable. A Collector that was moved from can only be destroyed or assigned to.
template <typename E>
  requires(Env<E> || EnvBatch<E>)
class Collector {
 public:
  using Environments = typename detail::EnvironmentsOf<E>::type;

  // Makes each environment from its type: E(seed) for an Env, E(envs, seed) for an EnvBatch. Seeds
  // count up over workers and environments, starting at options.seed. An exception of one of their
  // constructors is thrown as WorkerError. Throws std::invalid_argument if options or leaves do not
  // fit.
  template <typename Policy>
  Collector(CollectorOptions options, Policy policy)
      : Collector(options, std::move(policy), [options](std::int64_t worker) {
          const auto first = static_cast<std::uint64_t>(worker * options.envs);
          return Environments(options.envs, options.seed + first);
        }) {}

  // Calls make(worker) for the environments of each worker: an EnvBatch, or Each<E>, with
  // options.envs environments.
  template <typename Policy, typename Make>
    requires std::same_as<std::invoke_result_t<Make&, std::int64_t>, Environments>
  Collector(CollectorOptions options, Policy policy, Make make)
      : collection_(std::make_unique<detail::Collection>(
            options,
            [&make](std::int64_t worker) {
              return std::make_unique<detail::Wrapped<Environments>>(make(worker));
            },
            detail::policy_of<E>(std::move(policy)))) {}

  // Returns the next batch. Throws WorkerError if an environment or the policy of a worker threw an
  // exception. The rollout of this worker is lost, and its environments are reset before its next
  // one; rollouts that other workers have finished are delivered by a later call. Throws
  // std::logic_error after stop() and if an environment or the policy calls it, and
  // std::runtime_error in the child of a fork.
  Batch next() { return collection_->next(); }

  // Replaces the policy. Each worker uses the new one from its next rollout on, with a policy
  // version that is greater by one. Throws std::invalid_argument if its outputs differ from those
  // of the previous policy.
  template <typename Policy>
  void set_policy(Policy policy) {
    collection_->set_policy(detail::policy_of<E>(std::move(policy)));
  }

  // Accounts for every requested frame, of all workers or of one. At every moment, issued =
  // delivered + in flight + lost.
  Ledger ledger() const { return collection_->ledger(); }
  Ledger ledger(std::int64_t worker) const { return collection_->ledger(worker); }

  // Ends the workers, each after its current step. Frames in flight are lost; delivered batches
  // stay valid. A call of next() in another thread throws. The destructor does the same. Throws
  // std::logic_error if an environment or the policy calls it.
  void stop() { collection_->stop(); }

  // The leaves of a batch.
  const Layout& layout() const { return collection_->layout(); }

 private:
  std::unique_ptr<detail::Collection> collection_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
