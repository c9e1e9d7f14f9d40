// Groups of a worker's environments: each has its own recorder, and all recorders write one slab.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "recording.h"

using namespace pycollect;
using namespace pycollect::tests;

namespace {

// A group of one and a group of two, in a slab of three environments.
struct Groups {
  static RecorderOptions options(std::int64_t envs, std::int64_t first) {
    return {.envs = envs, .all_envs = 3, .first_env = first, .batched = true};
  }

  SlabPool pool{Placement(Layout(usual_leaves()), {1, 3, 2, Order::stack}), 1, true};
  Recording one{options(1, 0), 2};
  Recording two{options(2, 1), 2};

  void begin() {
    one.slab = two.slab = pool.acquire();
    one.recorder.begin(one.slab, 0, 4);
    two.recorder.begin(two.slab, 0, 4);
  }
};

}  // namespace

TEST_CASE("each group's frames are in the rows of its environments") {
  Groups groups;
  groups.begin();
  CHECK(groups.two.step(20, {0, 1}) == 1);
  groups.two.reset(90);
  CHECK(groups.one.step(10) == 0);
  CHECK(groups.two.step(21) == 0);
  CHECK(groups.one.step(11, {1}) == 1);
  groups.one.reset(80);
  const std::array<Recorder*, 1> beside{&groups.two.recorder};
  const RolloutHeader header = groups.one.recorder.finish({.worker = 3}, beside);
  CHECK(header.frames == 6);
  CHECK(header.envs == 3);
  CHECK(header.policy_version == 4);
  CHECK(header.worker == 3);

  const std::vector<std::vector<float>> roots{{0, 10}, {0, 20}, {0, 90}};
  const std::vector<std::vector<float>> nexts{{10, 11}, {20, 21}, {20, 21}};
  for (std::int64_t p = 0; p < 3; ++p) {
    for (std::int64_t t = 0; t < 2; ++t) {
      const auto i = static_cast<std::size_t>(p), j = static_cast<std::size_t>(t);
      CHECK(groups.one.number(kObservation, t, p) == roots[i][j]);
      CHECK(groups.one.number(kNextObservation, t, p) == nexts[i][j]);
    }
  }
  CHECK(groups.one.flags(kDone, 0) == "01");
  CHECK(groups.one.flags(kDone, 1) == "00");
  CHECK(groups.one.flags(kDone, 2) == "10");
  CHECK(groups.one.recorder.take_episodes().at(0).env == 0);
  CHECK(groups.two.recorder.take_episodes().at(0).env == 2);

  groups.begin();  // both have released the slab
  CHECK(groups.one.recorder.steps_left() == 2);
}

TEST_CASE("a rollout is complete when all groups are") {
  Groups groups;
  groups.begin();
  const std::array<Recorder*, 1> beside{&groups.two.recorder};
  for (int t = 0; t < 2; ++t) {
    groups.one.step(1);
  }
  CHECK_THROWS_AS(groups.one.recorder.finish({}, beside), std::logic_error);
  for (int t = 0; t < 2; ++t) {
    groups.two.step(1);
  }
  CHECK_THROWS_AS(groups.one.recorder.finish(), std::logic_error);
  CHECK(groups.one.recorder.finish({}, beside).frames == 6);
}

TEST_CASE("a rollout is not complete with a group twice and without another") {
  Groups groups;
  groups.begin();
  groups.one.step(1);
  groups.one.step(1);
  const std::array<Recorder*, 2> beside{&groups.one.recorder, &groups.one.recorder};
  CHECK_THROWS_AS(groups.one.recorder.finish({}, beside), std::logic_error);
}

TEST_CASE("a group must be within all environments") {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t first : {std::int64_t{-1}, std::int64_t{2}, kMost}) {
    CHECK(contains(error_of([&] { Recording(Groups::options(2, first), 1); }), "first_env"));
    const RecorderOptions alone{.envs = 2, .first_env = first};
    CHECK(contains(error_of([&] { Recording(alone, 1); }), "first_env"));
  }
}

TEST_CASE("a slab must have all environments") {
  Groups groups;
  Recording other({.envs = 1, .batched = true}, 2);
  other.begin();
  CHECK(contains(error_of([&] { groups.one.recorder.begin(other.slab, 0, 0); }), "3 envs"));
}

TEST_CASE("a stopped rollout ends with the same step for all groups") {
  Groups groups{{Placement(Layout(usual_leaves()), {1, 3, 4, Order::stack}), 1, true}};
  const auto stop = std::make_shared<std::atomic<std::uint64_t>>(0);
  const RolloutControl control{.stop = stop, .number = 1, .min_steps = 2};
  groups.one.slab = groups.two.slab = groups.pool.acquire();
  groups.one.recorder.begin(groups.one.slab, 0, 4, control);
  groups.two.recorder.begin(groups.two.slab, 0, 4, control);
  const std::array<Recorder*, 1> beside{&groups.two.recorder};
  CHECK_FALSE(groups.one.recorder.stop(beside));
  stop->store(1);
  CHECK_FALSE(groups.one.recorder.stop(beside));  // before its minimum number of steps
  CHECK(groups.one.step(10) == 0);
  CHECK(groups.one.step(11) == 0);  // not ended without a call of stop()
  CHECK(groups.two.step(20) == 0);
  CHECK(groups.one.recorder.stop(beside));
  CHECK_FALSE(groups.one.recorder.stop(beside));  // already stopped
  CHECK(groups.one.recorder.steps_left() == 1);
  CHECK(groups.two.recorder.steps_left() == 2);
  CHECK(groups.one.step(12) == 0);
  CHECK(groups.two.step(21) == 0);
  CHECK(groups.two.step(22) == 0);
  CHECK(groups.one.recorder.finish({}, beside).frames == 9);
  for (std::int64_t p = 0; p < 3; ++p) {
    CHECK(groups.one.number(kNextObservation, 2, p) == (p == 0 ? 12 : 22));
    CHECK(groups.one.integer(kIds, 2, p) >= 0);
    CHECK(groups.one.number(kNextObservation, 3, p) == 0);
    CHECK(groups.one.integer(kIds, 3, p) == -1);
  }
}

TEST_CASE("a rollout has the oldest version of its groups' first frames") {
  Groups groups;
  groups.begin();
  const std::array<Recorder*, 1> beside{&groups.two.recorder};
  groups.one.recorder.set_policy_version(7);
  groups.two.recorder.set_policy_version(6);
  for (int t = 0; t < 2; ++t) {
    groups.one.step(1);
    groups.two.step(1);
  }
  CHECK(groups.one.recorder.finish({}, beside).policy_version == 6);
}
