// Refused calls of a recorder, which must record nothing.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "recording.h"
#include "refused.h"

using namespace pycollect;
using namespace pycollect::tests;

namespace {

std::vector<std::byte> bytes_of(const Slab& slab) {
  return {slab.data(), slab.data() + slab.bytes()};
}

// A recorder with a delivered rollout of two steps.
struct Delivered : Recording {
  explicit Delivered(RecorderOptions options = {}) : Recording(options, 2) {
    begin();
    Recording::step(1);
    Recording::step(2);
    finish();
    batch = slab;
    before = bytes_of(*batch);
  }

  // Checks that no rollout is open, no step is accepted, and the batch is unchanged.
  void check_untouched() {
    CHECK(recorder.steps_left() == 0);
    CHECK_THROWS_AS(Recording::step(5), std::logic_error);
    CHECK_THROWS_AS(finish(), std::logic_error);
    CHECK(bytes_of(*batch) == before);
  }

  // Checks that the recorder continues as usual.
  void check_continues() {
    begin();
    CHECK(Recording::step(3) == 0);
    CHECK(Recording::step(4) == 0);
    CHECK(finish().frames == 2 * P);
    CHECK(number(kObservation, 0) == 2.0F);
    CHECK(integer(kIds, 0) == 0);
    CHECK(bytes_of(*batch) == before);
  }

  std::shared_ptr<Slab> batch;
  std::vector<std::byte> before;
};

}  // namespace

TEST_CASE("a refused begin() opens no rollout and changes no delivered batch") {
  Delivered r;
  Recorder& recorder = r.recorder;
  SUBCASE("no slab") {
    CHECK_REFUSED(recorder.begin(nullptr, 0, 0), "slab", std::invalid_argument);
  }
  SUBCASE("an unknown row") {
    CHECK_THROWS_AS(recorder.begin(r.pool.acquire(), 7, 0), std::out_of_range);
    CHECK_THROWS_AS(recorder.begin(r.pool.acquire(), -1, 0), std::out_of_range);
  }
  SUBCASE("too many steps") {
    CHECK_THROWS_AS(recorder.begin(r.pool.acquire(), 0, 0, {}, 3), std::invalid_argument);
  }
  SUBCASE("another layout") {
    SlabPool other(Placement(Layout(all_leaves()), {1, 1, 2}), 1, true);
    CHECK_THROWS_AS(recorder.begin(other.acquire(), 0, 0), std::invalid_argument);
  }
  SUBCASE("other environments") {
    SlabPool other(Placement(Layout(usual_leaves()), {1, 2, 2}), 1, true);
    CHECK_THROWS_AS(recorder.begin(other.acquire(), 0, 0), std::invalid_argument);
  }
  r.check_untouched();
  r.check_continues();
}

TEST_CASE("a new recorder accepts no step after a refused begin()") {
  Array<float> current{{2}, {0, 0}};
  const std::array<ConstTensorView, 1> views{current.view()};
  Recorder recorder(Layout(usual_leaves()), {{kObservation, current.view()}},
                    {{"action"}, {"log_prob"}}, {});
  recorder.restart(views);
  SlabPool pool(Placement(Layout(usual_leaves()), {1, 1, 2}), 1, true);
  CHECK_THROWS_AS(recorder.begin(pool.acquire(), 1, 0), std::out_of_range);
  CHECK(recorder.steps_left() == 0);
  Array<std::int64_t> action{{}, {0}};
  Array<float> log_prob{{1}, {0}};
  const std::array<ConstTensorView, 2> outputs{action.view(), log_prob.view()};
  CHECK_THROWS_AS(recorder.step(OneStep{views, 0, false, false, outputs}), std::logic_error);
  CHECK(pool.stats().lent == 0);
}

TEST_CASE("an open rollout is neither dropped nor restarted silently") {
  Delivered r;
  r.begin(6);
  r.step(3);
  const std::shared_ptr<Slab> open = r.slab;
  CHECK_REFUSED(r.recorder.begin(r.pool.acquire(), 0, 0), "begin", std::logic_error);
  CHECK_THROWS_AS(r.restart(90), std::logic_error);
  CHECK(r.recorder.steps_left() == 1);
  CHECK(r.step(4) == 0);
  CHECK(r.finish().policy_version == 6);
  CHECK(r.slab == open);
  CHECK(r.number(kObservation, 1) == 3.0F);
  CHECK(bytes_of(*r.batch) == r.before);
}

TEST_CASE("a step before a due reset is refused, naming the environment") {
  Recording r({.envs = 3}, 4, all_leaves());
  r.begin();
  CHECK(r.step(1, {0, 0, 1}, {0, 1, 0}) == 2);
  const std::vector<std::byte> before = bytes_of(*r.slab);
  CHECK_REFUSED(r.step(2), "step", std::logic_error);
  CHECK(bytes_of(*r.slab) == before);
  CHECK(r.recorder.frames() == 3);
  r.reset(50);
  CHECK(r.step(51, {1, 0, 0}) == 1);

  r.recorder.abandon();  // the episode has ended nevertheless
  r.begin();
  CHECK_THROWS_AS(r.step(60), std::logic_error);
  r.reset(70);
  CHECK(r.step(71) == 0);
  CHECK(r.number(kObservation, 0, 0) == 70.0F);
}

TEST_CASE("a refused step can be recorded again, even the last step of a stopped rollout") {
  Recording r({.envs = 2}, 4, all_leaves());
  const RolloutControl::Number stop = std::make_shared<std::atomic<std::uint64_t>>(0);
  r.begin(0, {stop, 1});
  r.step(1);
  stop->store(1);
  const std::vector<std::byte> before = bytes_of(*r.slab);
  const std::vector<float> current = r.current.values;
  Array<float> observation{{2, 2}, {9, 9, 9, 9}}, narrow{{2, 1}, {9, 9}};
  Array<double> reward{{2}, {9, 9}};
  Array<std::uint8_t> flag{{2}, {1, 1}};
  Array<std::int64_t> action{{2}, {9, 9}};
  Array<float> log_prob{{2, 1}, {9, 9}};
  const auto refused = [&](TensorView o, TensorView a, TensorView l) {
    const std::array<ConstTensorView, 1> observations{o};
    const std::array<ConstTensorView, 2> outputs{a, l};
    CHECK_THROWS_AS(
        r.recorder.step({observations, reward.view(), flag.view(), flag.view(), outputs}),
        std::invalid_argument);
  };
  refused(narrow.view(), action.view(), log_prob.view());
  refused(observation.view(), reward.view(), log_prob.view());
  refused(observation.view(), action.view(), reward.view());
  CHECK(bytes_of(*r.slab) == before);
  CHECK(r.current.values == current);
  CHECK(r.recorder.steps_left() == 3);
  CHECK(r.step(2) == -1);  // the last step
  CHECK(r.finish().frames == 4);
  CHECK(r.number(kObservation, 1, 1) == 1.0F);
  CHECK(r.recorder.take_episodes().empty());
}

TEST_CASE("after a refused reset, the environments still need a reset") {
  Recording r({.envs = 2}, 3);
  r.begin();
  r.step(1, {0, 1});
  const std::vector<std::byte> before = bytes_of(*r.slab);
  Array<float> narrow{{2, 1}, {9, 9}};
  const std::array<ConstTensorView, 1> bad{narrow.view()};
  CHECK_THROWS_AS(r.recorder.reset(bad), std::invalid_argument);
  CHECK(bytes_of(*r.slab) == before);
  CHECK(r.recorder.done()[1] == 1);
  CHECK_THROWS_AS(r.step(2), std::logic_error);
  r.reset(40);
  CHECK(r.step(41) == 0);
}

TEST_CASE("a negative limit of a trajectory's length is refused") {
  CHECK_REFUSED(Recording({.max_frames_per_traj = -1}, 1), "max_frames_per_traj",
                std::invalid_argument);
}
