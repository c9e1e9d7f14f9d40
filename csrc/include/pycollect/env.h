// The interface of environments: Env is one environment with one observation and one action;
// EnvBatch is P environments at once, with any number of observations and actions.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "pycollect/dtype.h"
#include "pycollect/layout.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// The result of one step. An episode ends if either flag is set: `terminated` by the task itself,
// `truncated` by something else, such as a step limit.
struct Outcome {
  double reward = 0;
  bool terminated = false;
  bool truncated = false;
};

namespace detail {

// The element type and shape of an action, which is a number or a std::array of numbers.
template <typename T>
struct Numbers {
  using Element = T;
  static Dims shape() { return {}; }
};
template <typename T, std::size_t n>
struct Numbers<std::array<T, n>> {
  using Element = T;
  static Dims shape() { return {static_cast<std::int64_t>(n)}; }
};

}  // namespace detail

// One environment:
//
//     using Number = float;                      // of its observation
//     using Action = std::int64_t;               // a number, or std::array of numbers
//     static constexpr std::size_t kObservation = 4;
//     explicit Pole(std::uint64_t seed);         // or a constructor without arguments
//     void reset(std::span<Number, kObservation> observation);
//     Outcome step(Action action, std::span<Number, kObservation> observation);
//
// Both methods write the observation. reset() writes the first one of a new episode. step() finds
// the observation on which the action was chosen and overwrites it with the true successor, also at
// the end of an episode. reset() is called before the first step and after each step that ended an
// episode. Methods are called by one thread at a time.
template <typename E>
concept Env = std::is_arithmetic_v<typename E::Number> &&
              std::is_arithmetic_v<typename detail::Numbers<typename E::Action>::Element> &&
              (E::kObservation > 0) &&
              (std::constructible_from<E, std::uint64_t> || std::default_initializable<E>) &&
              requires(E env, typename E::Action action,
                       std::span<typename E::Number, E::kObservation> observation) {
                env.reset(observation);
                { env.step(action, observation) } -> std::same_as<Outcome>;
              };

// P environments of one kind. observations() and actions() return leaves: key, dtype, and shape for
// one environment. Views of them are contiguous, [P, *shape], in the order of the leaves.
//
// reset() writes the first observation of a new episode into the rows whose mask is not 0 and
// leaves the other rows unchanged. step() reads the actions and overwrites every observation with
// its true successor. It writes one reward per environment and its two flags as 0 or 1. Methods are
// called by one thread at a time.
template <typename B>
concept EnvBatch = requires(
    B batch, std::span<const std::uint8_t> mask, std::span<const ConstTensorView> actions,
    std::span<const TensorView> views, std::span<double> rewards, std::span<std::uint8_t> flags) {
  { batch.envs() } -> std::convertible_to<std::int64_t>;
  { batch.observations() } -> std::convertible_to<std::vector<Leaf>>;
  { batch.actions() } -> std::convertible_to<std::vector<Leaf>>;
  batch.reset(mask, views);
  batch.step(actions, views, rewards, flags, flags);
};

// An EnvBatch that steps P environments of type Env one after the other. The key of the observation
// is "observation", that of the action is "action".
template <Env E>
class Each {
 public:
  // Environment p gets the seed `seed + p` if its constructor takes one. Throws
  // std::invalid_argument if `envs` is below 1.
  Each(std::int64_t envs, std::uint64_t seed) {
    if (envs < 1) {
      throw std::invalid_argument("envs: expected at least 1, got " + std::to_string(envs));
    }
    envs_.reserve(static_cast<std::size_t>(envs));
    for (std::int64_t p = 0; p < envs; ++p) {
      if constexpr (std::constructible_from<E, std::uint64_t>) {
        envs_.emplace_back(seed + static_cast<std::uint64_t>(p));
      } else {
        envs_.emplace_back();
      }
    }
  }

  // Takes existing environments.
  explicit Each(std::vector<E> envs) : envs_(std::move(envs)) {}

  // Replaces the environments by new ones, made with these seeds.
  void seed(std::span<const std::uint64_t> seeds)
    requires std::constructible_from<E, std::uint64_t>
  {
    std::vector<E> made;
    made.reserve(seeds.size());
    for (const std::uint64_t seed : seeds) {
      made.emplace_back(seed);
    }
    envs_ = std::move(made);
  }

  std::int64_t envs() const { return static_cast<std::int64_t>(envs_.size()); }
  std::vector<Leaf> observations() const {
    return {{"observation", dtype_of<Number>, {static_cast<std::int64_t>(E::kObservation)}}};
  }
  std::vector<Leaf> actions() const {
    using Parts = detail::Numbers<Action>;
    return {{"action", dtype_of<typename Parts::Element>, Parts::shape()}};
  }

  void reset(std::span<const std::uint8_t> mask, std::span<const TensorView> observations) {
    const Rows rows(observations);
    for (std::size_t p = 0; p < envs_.size(); ++p) {
      if (mask[p] != 0) {
        envs_[p].reset(rows[p]);
      }
    }
  }

  void step(std::span<const ConstTensorView> actions, std::span<const TensorView> observations,
            std::span<double> rewards, std::span<std::uint8_t> terminated,
            std::span<std::uint8_t> truncated) {
    const Action* const action = reinterpret_cast<const Action*>(actions[0].data);
    const Rows rows(observations);
    const std::span<E> envs(envs_);
    const auto step_one = [&](std::size_t p) {
      const Outcome outcome = envs[p].step(action[p], rows[p]);
      rewards[p] = outcome.reward;
      terminated[p] = static_cast<std::uint8_t>(outcome.terminated);
      truncated[p] = static_cast<std::uint8_t>(outcome.truncated);
    };
    if (envs.size() == 1) {  // a compiler's setup of the loop would take as long as a step
      step_one(0);
      return;
    }
    for (std::size_t p = 0; p < envs.size(); ++p) {
      step_one(p);
    }
  }

 private:
  using Number = typename E::Number;
  using Action = typename E::Action;

  // The observation of each environment. It copies the address: the compiler would otherwise reload
  // the view after each write through a byte pointer.
  class Rows {
   public:
    explicit Rows(std::span<const TensorView> observations)
        : data_(reinterpret_cast<Number*>(observations[0].data)) {}
    std::span<Number, E::kObservation> operator[](std::size_t p) const {
      return std::span<Number, E::kObservation>(data_ + p * E::kObservation, E::kObservation);
    }

   private:
    Number* data_;
  };

  std::vector<E> envs_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
