#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fork.h"
#include "pycollect/collector.h"
#include "refused.h"

using namespace pycollect;
using pycollect::tests::refused;

namespace {

// Observes its seed and the number of steps in the episode, which ends after `length` steps.
struct Counter {
  using Number = float;
  using Action = std::int64_t;
  static constexpr std::size_t kObservation = 2;
  explicit Counter(std::uint64_t given, int steps_of_episode = 5)
      : seed(given), length(steps_of_episode) {}

  void reset(std::span<float, 2> observation) {
    steps = 0;
    write(observation);
  }
  Outcome step(std::int64_t action, std::span<float, 2> observation) {
    ++steps;
    write(observation);
    return {.reward = static_cast<double>(action), .terminated = steps == length};
  }
  void write(std::span<float, 2> observation) const {
    observation[0] = static_cast<float>(seed);
    observation[1] = static_cast<float>(steps);
  }

  std::uint64_t seed;
  int length;
  int steps = 0;
};

// As Counter, but with an observation so large that it is written on its own, not in a run of
// steps.
struct Wide {
  using Number = float;
  using Action = std::int64_t;
  static constexpr std::size_t kObservation = 20'000;
  explicit Wide(std::uint64_t seed) : counter(seed) {}

  void reset(std::span<float, kObservation> observation) {
    std::fill(observation.begin(), observation.end(), -1.0F);
    counter.reset(observation.first<2>());
  }
  Outcome step(std::int64_t action, std::span<float, kObservation> observation) {
    const Outcome outcome = counter.step(action, observation.first<2>());
    observation[kObservation - 1] = observation[1];
    return outcome;
  }

  Counter counter;
};

// Chooses the observed number of steps as the action.
template <typename E>
constexpr auto kCountOf = [](std::span<const float> observation, std::span<std::int64_t> action) {
  for (std::size_t p = 0; p < action.size(); ++p) {
    action[p] = static_cast<std::int64_t>(observation[E::kObservation * p + 1]);
  }
};
constexpr auto kCount = kCountOf<Counter>;

// Compares the starts and ends of trajectories, and the episodes in any order.
void check_same_trajectories(const Batch& batch, const Batch& expected) {
  const auto segments = [](const Batch& of) {
    std::vector<std::array<std::int64_t, 3>> found;
    for (const Segment& segment : of.trajectories().segments()) {
      found.push_back({segment.row, segment.start, segment.length});
    }
    return found;
  };
  CHECK(segments(batch) == segments(expected));
  const auto ended = [](const Batch& of) {
    std::vector<std::array<double, 3>> found;
    for (const Batch::Episode& episode : of.episodes()) {
      found.push_back({static_cast<double>(episode.worker + episode.env),
                       static_cast<double>(episode.length), episode.total_reward});
    }
    std::sort(found.begin(), found.end());
    return found;
  };
  CHECK(ended(batch) == ended(expected));
}

void check_balance(const Ledger& ledger) {
  CHECK(ledger.issued == ledger.delivered + ledger.in_flight + ledger.lost);
}

template <typename Function>
std::string nested_text(Function&& function, std::int64_t& worker) {
  try {
    function();
  } catch (const WorkerError& error) {
    worker = error.worker();
    try {
      std::rethrow_if_nested(error);
    } catch (const std::exception& cause) {
      return cause.what();
    }
  }
  return "nothing";
}

}  // namespace

TEST_CASE("a batch of all workers has every frame in its cell") {
  Collector<Counter> collector({.workers = 3, .envs = 2, .steps = 4, .seed = 10}, kCount);
  CHECK(collector.ledger().issued == 0);
  for (int b = 0; b < 3; ++b) {
    const Batch batch = collector.next();
    const auto observation = batch.get<float>("observation");
    const auto next = batch.get<float>("next.observation");
    const auto reward = batch.get<float>("next.reward");
    const auto done = batch.get<bool>("next.done");
    CHECK(observation.shape() == Dims{3, 2, 4, 2});
    CHECK(reward.size() == 24);
    for (std::size_t row = 0; row < 6; ++row) {
      for (std::size_t t = 0; t < 4; ++t) {
        const std::size_t cell = row * 4 + t;
        const auto step = static_cast<float>((4 * static_cast<std::size_t>(b) + t) % 5);
        CHECK(observation[2 * cell] == 10.0F + static_cast<float>(row));  // consecutive seeds
        CHECK(observation[2 * cell + 1] == step);
        CHECK(next[2 * cell + 1] == step + 1);  // the true successor, even at an end
        CHECK(reward[cell] == step);
        CHECK(done[cell] == (step == 4));
      }
    }
    CHECK(batch.frames() == 24);
    CHECK(batch.header(1).worker == 1);
    CHECK(batch.header(2).sequence == b);
    check_balance(collector.ledger());
    CHECK(collector.ledger().delivered == 24 * (b + 1));
    CHECK(collector.ledger(1).delivered == 8 * (b + 1));
    CHECK(collector.ledger().in_flight == 0);
  }
}

// The arrays of one environment are checked once, those of several at each step.
TEST_CASE_TEMPLATE("environments give the same frames recorded one by one and together", E, Counter,
                   Wide) {
  for (const std::int64_t most : {0, 3}) {
    for (const bool set_truncated : {false, true}) {
      CollectorOptions together{.workers = 1, .envs = 3, .steps = 7, .seed = 10};
      together.max_frames_per_traj = most;
      together.set_truncated = set_truncated;
      CollectorOptions apart = together;
      apart.workers = 3;
      apart.envs = 1;
      Collector<E> of_three(together, kCountOf<E>), of_one(apart, kCountOf<E>);
      for (int b = 0; b < 4; ++b) {
        const Batch expected = of_three.next(), batch = of_one.next();
        const auto check_same = [&]<typename T>(const char* key, T /*type*/) {
          CAPTURE(key);
          const auto one = batch.get<T>(key), other = expected.get<T>(key);
          CHECK(std::equal(one.data(), one.data() + one.size(), other.data(),
                           other.data() + other.size()));
        };
        for (const char* key : {"observation", "next.observation", "next.reward"}) {
          check_same(key, float{});
        }
        for (const char* key : {"next.done", "next.terminated", "next.truncated"}) {
          check_same(key, bool{});
        }
        check_same("action", std::int64_t{});
        check_same_trajectories(batch, expected);
      }
      CHECK(of_one.ledger().delivered == of_three.ledger().delivered);
    }
  }
}

TEST_CASE("trajectories continue in the next batch, and episodes are reported when they end") {
  Collector<Counter> collector({.workers = 2, .envs = 2, .steps = 4}, kCount);
  const Batch first = collector.next();
  CHECK(first.trajectories().count() == 4);
  CHECK(first.episodes().empty());
  const Batch second = collector.next();
  CHECK(second.trajectories().count() == 8);
  REQUIRE(second.episodes().size() == 4);
  for (const Batch::Episode& episode : second.episodes()) {
    CHECK(episode.length == 5);
    CHECK(episode.total_reward == 0 + 1 + 2 + 3 + 4);
  }
  CHECK(second.episodes()[3].worker == 1);
  CHECK(second.episodes()[3].env == 1);
  // Ids are unique over workers, and a trajectory that continues keeps its id.
  const auto before = first.get<std::int64_t>("collector.traj_ids");
  const auto after = second.get<std::int64_t>("collector.traj_ids");
  std::vector<std::int64_t> seen;
  for (const Segment& segment : first.trajectories().segments()) {
    seen.push_back(before.of(segment)[0]);
    CHECK(after[static_cast<std::size_t>(segment.row * 4)] == seen.back());
  }
  CHECK(seen == std::vector<std::int64_t>{0, 1, 2, 3});
}

TEST_CASE("the first finished rollout is delivered without waiting for other workers") {
  std::mutex mutex;
  std::condition_variable opened;
  bool open = false;
  // Worker 1 waits until the test has its batches of worker 0.
  const auto gated = [&](std::span<const float> observation, std::span<std::int64_t> action) {
    if (observation[0] >= 2) {
      std::unique_lock lock(mutex);
      opened.wait(lock, [&] { return open; });
    }
    kCount(observation, action);
  };
  Collector<Counter> collector({.workers = 2, .envs = 2, .steps = 4, .ready = Ready::first}, gated);
  for (int b = 0; b < 3; ++b) {
    const Batch batch = collector.next();
    CHECK(batch.geometry().workers == 1);
    CHECK(batch.header(0).worker == 0);
    CHECK(batch.header(0).sequence == b);
    check_balance(collector.ledger());
    CHECK(collector.ledger().in_flight == 16);  // the worker was asked again at once
  }
  {
    const std::lock_guard lock(mutex);
    open = true;
  }
  opened.notify_all();
  bool came = false;
  for (int b = 0; b < 10000 && !came; ++b) {
    came = collector.next().header(0).worker == 1;
  }
  CHECK(came);
  collector.stop();
  const Ledger ledger = collector.ledger();
  check_balance(ledger);
  CHECK(ledger.in_flight == 0);
  CHECK(ledger.lost > 0);
  CHECK_THROWS_AS(collector.next(), std::logic_error);
}

TEST_CASE("an exception of a worker is thrown, and the next batch keeps the other rollouts") {
  std::atomic<int> calls{0};
  // Worker 1 fails in its second rollout, once.
  const auto failing = [&](std::span<const float> observation, std::span<std::int64_t> action) {
    if (observation[0] == 1 && ++calls == 6) {
      throw std::runtime_error("no action");
    }
    kCount(observation, action);
  };
  Collector<Counter> collector({.workers = 2, .envs = 1, .steps = 4}, failing);
  const Batch first = collector.next();
  std::int64_t worker = -1;
  CHECK(nested_text([&] { collector.next(); }, worker) == "no action");
  CHECK(worker == 1);
  const Ledger after = collector.ledger();
  check_balance(after);
  CHECK(after.lost == 4);
  CHECK(collector.ledger(1).lost == 4);
  CHECK(after.in_flight == 4);  // the finished rollout of worker 0

  const Batch second = collector.next();
  const auto steps = second.get<float>("observation");
  CHECK(steps[1] == 4);                            // worker 0 continued
  CHECK(steps[9] == 0);                            // worker 1's environment was reset
  CHECK(first.get<float>("observation")[1] == 0);  // and the delivered batch is unchanged
  check_balance(collector.ledger());
  CHECK(collector.ledger().delivered == 16);
  const auto ids = second.get<std::int64_t>("collector.traj_ids");
  CHECK(ids[4] > ids[0]);  // a lost trajectory does not continue
}

TEST_CASE("a worker that failed is asked again with Ready::first") {
  std::atomic<int> calls{0};
  const auto failing = [&](std::span<const float> observation, std::span<std::int64_t> action) {
    if (++calls == 2) {
      throw std::runtime_error("no action");
    }
    kCount(observation, action);
  };
  Collector<Counter> collector({.steps = 4, .ready = Ready::first}, failing);
  CHECK_THROWS_AS(collector.next(), WorkerError);
  CHECK(collector.ledger().lost == 4);
  CHECK(collector.next().frames() == 4);
  check_balance(collector.ledger());
}

TEST_CASE("an error in the constructor of environments names the worker") {
  struct Broken : Counter {
    explicit Broken(std::uint64_t given) : Counter(given) {
      if (given == 2) {
        throw std::runtime_error("no window");
      }
    }
  };
  std::int64_t worker = -1;
  CHECK(nested_text([] { Collector<Broken> c({.workers = 2, .envs = 2}, kCount); }, worker) ==
        "no window");
  CHECK(worker == 1);
}

TEST_CASE("invalid options are refused by name") {
  CHECK_THROWS_AS(Collector<Counter>({.workers = 0}, kCount), std::invalid_argument);
  CHECK_THROWS_AS(Collector<Counter>({.envs = 0}, kCount), std::invalid_argument);
  CHECK_THROWS_AS(Collector<Counter>({.steps = 0}, kCount), std::invalid_argument);
  CHECK_THROWS_AS(Collector<Counter>({.max_frames_per_traj = -1}, kCount), std::invalid_argument);
  const auto make = [](std::int64_t) { return Each<Counter>(3, 0); };
  CHECK_THROWS_AS(Collector<Counter>({.envs = 2}, kCount, make), std::invalid_argument);
}

namespace {

// An EnvBatch with two observations and two actions.
struct Pairs {
  Pairs(std::int64_t count, std::uint64_t) : n(count) {}

  std::int64_t envs() const { return n; }
  std::vector<Leaf> observations() const {
    return {{"image", DType::uint8, {2, 2}}, {"sensors.speed", DType::float64, {}}};
  }
  std::vector<Leaf> actions() const {
    return {{"steer", DType::float32, {}}, {"gear", DType::int32, {1}}};
  }
  void reset(std::span<const std::uint8_t> mask, std::span<const TensorView> views) {
    for (std::int64_t p = 0; p < n; ++p) {
      if (mask[static_cast<std::size_t>(p)] != 0) {
        views[1].as<double>()[p] = 0;
      }
    }
  }
  void step(std::span<const ConstTensorView> actions, std::span<const TensorView> views,
            std::span<double> rewards, std::span<std::uint8_t> terminated,
            std::span<std::uint8_t> truncated) {
    for (std::int64_t p = 0; p < n; ++p) {
      const auto i = static_cast<std::size_t>(p);
      views[1].as<double>()[p] += actions[0].as<float>()[p];
      views[0].as<std::uint8_t>()[4 * p] = static_cast<std::uint8_t>(actions[1].as<int>()[p]);
      rewards[i] = 1;
      terminated[i] = truncated[i] = 0;
    }
  }
  std::int64_t n;
};

// Chooses actions and returns a value. Counts the calls of its own copy.
struct Driver {
  std::vector<Leaf> outputs() const { return {{"value", DType::float32, {}}}; }
  void seed(std::uint64_t given) { mine = given; }
  void operator()(std::span<const ConstTensorView> observations,
                  std::span<const TensorView> outputs) {
    for (std::int64_t p = 0; p < observations[1].shape[0]; ++p) {
      outputs[0].as<float>()[p] = speed;
      outputs[1].as<int>()[p] = 3;
      outputs[2].as<float>()[p] = static_cast<float>(mine % 1000);
    }
  }
  float speed = 2;
  std::uint64_t mine = 0;
};

}  // namespace

TEST_CASE("environments with several observations and actions, and a policy with outputs") {
  Collector<Pairs> collector({.workers = 2, .envs = 3, .steps = 2}, Driver{});
  const Batch batch = collector.next();
  CHECK(batch.get<std::uint8_t>("image").shape() == Dims{2, 3, 2, 2, 2});
  CHECK(batch.get<double>("next.sensors.speed")[1] == 4);
  CHECK(batch.get<std::int32_t>("gear")[0] == 3);
  const auto value = batch.get<float>("value");
  CHECK(value[0] != value[6]);  // each worker's copy has its own seed
}

TEST_CASE("a new policy is used from each worker's next rollout on") {
  Collector<Pairs> collector({.workers = 2, .envs = 1, .steps = 2}, Driver{});
  CHECK(collector.next().header(1).policy_version == 0);
  Driver faster;
  faster.speed = 7;
  collector.set_policy(faster);
  const Batch batch = collector.next();
  CHECK(batch.header(0).policy_version == 1);
  CHECK(batch.get<std::int64_t>("collector.policy_version")[3] == 1);
  for (const float steer : batch.get<float>("steer")) {
    CHECK(steer == 7);
  }
  const auto by_views = [](std::span<const ConstTensorView>, std::span<const TensorView>) {};
  CHECK_THROWS_AS(collector.set_policy(by_views), std::invalid_argument);  // no "value"
}

TEST_CASE("a policy that is passed by reference can change between batches") {
  Driver driver;
  Collector<Pairs> collector({.envs = 1, .steps = 1}, std::ref(driver));
  driver.speed = 5;
  const Batch batch = collector.next();
  CHECK(batch.get<float>("steer")[0] == 5);
}

TEST_CASE("the policy of any worker may read and replace, but not advance or stop its collector") {
  for (const Ready ready : {Ready::all, Ready::first}) {
    for (const float calling : {0.0F, 1.0F}) {  // the worker whose policy calls
      Collector<Counter>* own = nullptr;
      std::atomic<int> calls{0};
      std::vector<std::string> refusals(2);
      const auto calls_back = [&](std::span<const float> observation,
                                  std::span<std::int64_t> action) {
        kCount(observation, action);
        if (observation[0] == calling && ++calls == 6) {
          own->set_policy(kCount);
          check_balance(own->ledger());
          refusals[0] = refused<std::logic_error>([&] { own->next(); });
          refusals[1] = refused<std::logic_error>([&] { own->stop(); });
        }
      };
      Collector<Counter> collector({.workers = 2, .steps = 4, .ready = ready}, calls_back);
      own = &collector;
      while (calls < 6) {
        collector.next();
      }
      collector.next();
      collector.stop();
      CHECK(refusals == std::vector<std::string>{"next", "stop"});
    }
  }
}

TEST_CASE("an environment may have a collector of its own") {
  struct Planner : Counter {
    using Counter::Counter;
    Outcome step(std::int64_t action, std::span<float, 2> observation) {
      Collector<Counter> model({.workers = 2, .steps = 2}, kCount);
      CHECK(model.next().frames() == 4);
      return Counter::step(action, observation);
    }
  };
  Collector<Planner> collector({.workers = 2, .steps = 3}, kCountOf<Planner>);
  CHECK(collector.next().frames() == 6);
  CHECK(collector.next().frames() == 6);
}

TEST_CASE("a forked child cannot use its parent's collector" * doctest::skip(!kMayFork)) {
  for (const Ready ready : {Ready::all, Ready::first}) {
    Collector<Counter> collector({.workers = 2, .steps = 4, .ready = ready}, kCount);
    collector.next();
    wait_until_other_threads_sleep();
    CHECK(child_succeeds(
        [&] { return refused<std::runtime_error>([&] { collector.next(); }) == "next"; }));
    CHECK(collector.next().frames() > 0);
  }
}

TEST_CASE("a batch outlives its collector, and refuses invalid arguments") {
  std::optional<Batch> kept;
  {
    Collector<Counter> collector({.envs = 2, .steps = 3}, kCount);
    kept = collector.next();
  }
  CHECK(kept->get<float>("observation")[3] == 1);
  CHECK_THROWS_AS(kept->get<double>("observation"), std::invalid_argument);
  CHECK_THROWS_AS(kept->view("obs"), std::out_of_range);
  CHECK_THROWS_AS(kept->header(1), std::out_of_range);
  CHECK_REFUSED(Batch(nullptr), "slab", std::invalid_argument);
  const Batch copy = *kept;
  CHECK(copy.lease() == kept->lease());
}

TEST_CASE("the same seed gives the same batches, independent of thread timing") {
  const auto collected = [] {
    Collector<Counter> collector({.workers = 4, .envs = 3, .steps = 7, .seed = 3}, kCount);
    std::vector<std::int64_t> ids;
    for (int b = 0; b < 5; ++b) {
      const Batch batch = collector.next();
      const auto found = batch.get<std::int64_t>("collector.traj_ids");
      ids.insert(ids.end(), found.begin(), found.end());
    }
    return ids;
  };
  CHECK(collected() == collected());
}

TEST_CASE("several threads use one collector, read its ledger and stop it") {
  for (const Ready ready : {Ready::all, Ready::first}) {
    Collector<Counter> collector({.workers = 3, .envs = 2, .steps = 8, .ready = ready}, kCount);
    std::atomic<long long> frames{0};
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < 3; ++i) {
        threads.emplace_back([&] {
          try {
            for (;;) {
              frames += collector.next().frames();
              check_balance(collector.ledger());
            }
          } catch (const std::logic_error&) {  // the collector was stopped
          }
        });
      }
      while (frames < 1000) {
        std::this_thread::yield();
      }
      collector.stop();
    }
    const Ledger ledger = collector.ledger();
    check_balance(ledger);
    CHECK(ledger.in_flight == 0);
    CHECK(ledger.delivered == frames);
  }
}
