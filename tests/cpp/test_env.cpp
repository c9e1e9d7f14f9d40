#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "pycollect/env.h"
#include "refused.h"

using namespace pycollect;

namespace {

// Observes its seed and the number of steps in the episode, which ends at step action[0].
struct Counter {
  using Number = double;
  using Action = std::array<std::int32_t, 2>;
  static constexpr std::size_t kObservation = 2;
  explicit Counter(std::uint64_t given) : seed(given) {}

  void reset(std::span<double, 2> observation) {
    steps = 0;
    observation[0] = static_cast<double>(seed);
    observation[1] = 0;
  }
  Outcome step(Action action, std::span<double, 2> observation) {
    observation[1] = ++steps;
    return {.reward = 10.0 * action[1], .truncated = steps == action[0]};
  }

  std::uint64_t seed;
  int steps = 0;
};

struct NoStep {
  using Number = float;
  using Action = int;
  static constexpr std::size_t kObservation = 1;
  void reset(std::span<float, 1>) {}
};

}  // namespace

static_assert(Env<Counter>);
static_assert(!Env<NoStep>);
static_assert(EnvBatch<Each<Counter>>);
static_assert(!EnvBatch<Counter>);

TEST_CASE("each of several environments writes its own row") {
  Each<Counter> batch(3, 7);
  CHECK(batch.envs() == 3);
  CHECK(batch.observations() == std::vector<Leaf>{{"observation", DType::float64, {2}}});
  CHECK(batch.actions() == std::vector<Leaf>{{"action", DType::int32, {2}}});

  std::array<double, 6> seen{-1, -1, -1, -1, -1, -1};
  std::array<std::int32_t, 6> chosen{1, 5, 2, 6, 1, 7};
  const std::array observations{view(std::span(seen), {3, 2})};
  const std::array<ConstTensorView, 1> actions{view(std::span(chosen), {3, 2})};
  const std::array<std::uint8_t, 3> mask{1, 0, 1};
  batch.reset(mask, observations);
  CHECK(seen == std::array<double, 6>{7, 0, -1, -1, 9, 0});

  std::array<double, 3> rewards{};
  std::array<std::uint8_t, 3> terminated{9, 9, 9}, truncated{9, 9, 9};
  batch.step(actions, observations, rewards, terminated, truncated);
  CHECK(rewards == std::array<double, 3>{50, 60, 70});
  CHECK(terminated == std::array<std::uint8_t, 3>{0, 0, 0});
  CHECK(truncated == std::array<std::uint8_t, 3>{1, 0, 1});
  CHECK(seen[1] == 1);
}

TEST_CASE("there is at least one environment") {
  for (const std::int64_t envs : {0, -1}) {
    CHECK_REFUSED(Each<Counter>(envs, 7), "envs", std::invalid_argument);
  }
}

TEST_CASE("seed() replaces each environment by one with its own seed") {
  Each<Counter> batch(2, 7);
  const std::array<std::uint64_t, 2> seeds{40, 30};
  batch.seed(seeds);
  std::array<double, 4> seen{};
  const std::array observations{view(std::span(seen), {2, 2})};
  batch.reset(std::array<std::uint8_t, 2>{1, 1}, observations);
  CHECK(seen == std::array<double, 4>{40, 0, 30, 0});
}
