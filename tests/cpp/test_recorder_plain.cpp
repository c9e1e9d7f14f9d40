// Plain steps, whose arrays match their leaves exactly, take a faster path than other steps.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "recorder_state.h"
#include "recording.h"

using namespace pycollect;
using namespace pycollect::tests;

namespace {

// Compares every cell of both, including the cells after the end of the rollout.
void check_alike(const Recording& one, const Recording& other) {
  const Placement& placement = one.slab->placement();
  for (std::size_t i = 0; i < placement.layout().size(); ++i) {
    const TensorView rows = one.slab->rows(i, 0), others = other.slab->rows(i, 0);
    const auto bytes = static_cast<std::size_t>(placement.layout()[i].frame_bytes());
    for (std::int64_t p = 0; p < one.P; ++p) {
      for (std::int64_t t = 0; t < placement.geometry().steps; ++t) {
        if (std::memcmp(rows[p][t].data, others[p][t].data, bytes) != 0) {
          FAIL_CHECK(to_string(placement.layout()[i].key), " of env ", p, " at step ", t);
        }
      }
    }
  }
}

// Makes the same step and reset of both.
std::int64_t step_both(Recording& one, Recording& other, float n) {
  std::vector<std::uint8_t> ends, cuts;
  for (std::int64_t p = 0; p < one.P; ++p) {
    ends.push_back((static_cast<std::int64_t>(n) + 3 * p) % 7 == 0);
    cuts.push_back((static_cast<std::int64_t>(n) + p) % 5 == 0);
  }
  const std::int64_t due = one.step(n, ends, cuts);
  CHECK(other.step(n, ends, cuts) == due);
  if (due != 0 && due != -1) {
    one.reset(1000 + n);
    other.reset(1000 + n);
  }
  return due;
}

// Compares rollouts with some plain steps to equal rollouts without plain steps.
void check_mixed(const RecorderOptions& options, bool live, Order order) {
  constexpr std::int64_t kSteps = 37;
  Recording mixed(options, kSteps, usual_leaves(), live, {}, order);
  Recording cast(options, kSteps, usual_leaves(), live, {}, order);
  cast.as_doubles = true;
  mixed.as_numbers = options.envs == 1 && options.max_frames_per_traj == 0;
  float n = 0;
  for (const int every : {1000, 2, 3, 9, 1}) {  // every n-th step is cast
    for (const std::int64_t steps : {37, 20, 16, 1}) {
      mixed.begin(5, {}, steps);
      cast.begin(5, {}, steps);
      for (std::int64_t t = 0; t < steps; ++t) {
        n += 1;
        mixed.as_doubles = (t + 1) % every == 0;
        step_both(mixed, cast, n);
        CHECK(was_plain(mixed.recorder) == !mixed.as_doubles);
        CHECK_FALSE(was_plain(cast.recorder));
      }
      const RolloutHeader header = mixed.finish();
      CHECK(cast.finish().frames == header.frames);
      check_alike(mixed, cast);
    }
  }
}

// Bytes that depend on the step, the environment and the position in the frame.
template <typename T>
Array<T> frames_of(std::int64_t envs, std::int64_t bytes, std::int64_t step) {
  Array<T> array{with_envs(envs, true, {bytes}), std::vector<T>(envs * bytes)};
  for (std::int64_t i = 0; i < envs * bytes; ++i) {
    array.values[i] = static_cast<T>((7 * step + 3 * i) % 251);
  }
  return array;
}

// Records one step of frames with `bytes` bytes.
std::int64_t step_of_bytes(Recorder& recorder, std::int64_t envs, std::int64_t bytes,
                           std::int64_t step, bool wide) {
  auto as_stored = frames_of<std::uint8_t>(envs, bytes, step);
  auto as_integers = frames_of<std::int64_t>(envs, bytes, step);
  auto action = frames_of<std::uint8_t>(envs, bytes, 100 + step);
  Array<float> reward{{envs}, std::vector<float>(envs, 1)};
  Array<std::uint8_t> flags{{envs}, std::vector<std::uint8_t>(envs, 0)};
  const std::array<ConstTensorView, 1> observations{wide ? as_integers.view() : as_stored.view()};
  const std::array<ConstTensorView, 1> outputs{action.view()};
  return recorder.step({observations, reward.view(), flags.view(), flags.view(), outputs});
}

// Checks that the leaf has the frames of step `first` and later ones.
void check_frames(const Slab& slab, const Key& key, std::int64_t first) {
  const int leaf = slab.placement().layout().find(key);
  REQUIRE(leaf >= 0);
  const TensorView rows = slab.rows(static_cast<std::size_t>(leaf), 0);
  const std::int64_t envs = rows.shape[0], steps = rows.shape[1], bytes = rows.shape[2];
  for (std::int64_t t = 0; t < steps; ++t) {
    const auto expected = frames_of<std::uint8_t>(envs, bytes, first + t);
    for (std::int64_t p = 0; p < envs; ++p) {
      INFO(to_string(key), " of env ", p, " at step ", t);
      CHECK(std::memcmp(rows[p][t].data, expected.values.data() + p * bytes,
                        static_cast<std::size_t>(bytes)) == 0);
    }
  }
}

}  // namespace

TEST_CASE("mixing plain and other steps gives the same rollout as casting all") {
  for (const std::int64_t envs : {1, 2, 7, 8, 16, 33}) {
    for (const bool live : {true, false}) {
      for (const std::int64_t longest : {0, 4}) {
        CAPTURE(envs);
        check_mixed({.envs = envs,
                     .batched = live,
                     .max_frames_per_traj = longest,
                     .set_truncated = longest == 4},
                    live, Order::stack);
      }
    }
  }
}

TEST_CASE("mixing plain and other steps gives the same slab in time order as casting all") {
  for (const std::int64_t envs : {1, 7, 16}) {
    CAPTURE(envs);
    check_mixed({.envs = envs}, true, Order::time);
  }
}

TEST_CASE("a step of environments that reset themselves is a step and a reset") {
  constexpr std::int64_t kSteps = 20;
  for (const std::int64_t envs : {2, 7, 33}) {
    for (const bool live : {true, false}) {
      CAPTURE(envs);
      const RecorderOptions options{.envs = envs, .set_truncated = live};
      Recording own(options, kSteps, usual_leaves(), live);
      Recording other(options, kSteps, usual_leaves(), live);
      float n = 0;
      for (const std::int64_t steps : {20, 8, 1}) {
        own.begin(5, {}, steps);
        other.begin(5, {}, steps);
        for (std::int64_t t = 0; t < steps; ++t) {
          n += 1;
          std::vector<std::uint8_t> ends, cuts;
          for (std::int64_t p = 0; p < envs; ++p) {
            ends.push_back((static_cast<std::int64_t>(n) + 3 * p) % 7 == 0);
            cuts.push_back((static_cast<std::int64_t>(n) + p) % 5 == 0);
          }
          own.first = 1000 + n;
          CHECK(own.step(n, ends, cuts) == 0);
          if (other.step(n, ends, cuts) != 0) {
            other.reset(1000 + n);
          }
        }
        CHECK(own.finish().frames == other.finish().frames);
        check_alike(own, other);
        CHECK(own.current.values == other.current.values);
        const auto episodes = own.recorder.take_episodes(), others = other.recorder.take_episodes();
        REQUIRE(episodes.size() == others.size());
        for (std::size_t i = 0; i < episodes.size(); ++i) {
          CHECK(episodes[i].env == others[i].env);
          CHECK(episodes[i].length == others[i].length);
          CHECK(episodes[i].total_reward == others[i].total_reward);
        }
      }
    }
  }
}

TEST_CASE("a step of environments that reset themselves is not recorded if it needs a cast") {
  Recording own({.envs = 2}, 4), limited({.envs = 2, .max_frames_per_traj = 3}, 4);
  for (Recording* recording : {&own, &limited}) {
    recording->begin();
    recording->first = 9.0F;
    recording->as_doubles = recording == &own;
    CHECK(recording->step(1, {1, 0}) == Recording::kNotRecorded);
    recording->first.reset();
    CHECK(recording->step(1, {1, 0}) == 1);
    recording->reset(2);
    recording->recorder.abandon();
  }
  own.begin();
  own.first = 9.0F;
  own.as_doubles = true;  // only last observations need a cast, and no episode ends
  CHECK(own.step(1) == 0);
}

TEST_CASE("frames of any size are recorded unchanged by plain and other steps") {
  constexpr std::int64_t kSteps = 70;
  for (const std::int64_t bytes : {1, 3, 5, 17}) {
    for (const std::int64_t envs : {1, 3, 8, 9}) {
      CAPTURE(bytes);
      CAPTURE(envs);
      std::vector<Leaf> leaves = usual_leaves();
      std::erase_if(leaves, [](const Leaf& leaf) { return leaf.key == Key{"log_prob"}; });
      for (Leaf& leaf : leaves) {
        if (leaf.key == kObservation || leaf.key == kNextObservation || leaf.key == Key{"action"}) {
          leaf = {leaf.key, DType::uint8, {bytes}};
        }
      }
      SlabPool pool(Placement(Layout(leaves), {1, envs, kSteps}), 1, true);
      auto current = frames_of<std::uint8_t>(envs, bytes, 0);
      const std::array<ConstTensorView, 1> views{current.view()};
      Recorder recorder(Layout(leaves), {{kObservation, current.view(), false}}, {{"action"}},
                        {.envs = envs, .batched = true});
      recorder.restart(views);
      const std::shared_ptr<Slab> slab = pool.acquire();
      recorder.begin(slab, 0, 0);
      for (std::int64_t t = 1; t <= kSteps; ++t) {
        const bool wide = t % 11 == 0;
        CHECK(step_of_bytes(recorder, envs, bytes, t, wide) == 0);
        CHECK(was_plain(recorder) == !wide);
      }
      recorder.finish();
      check_frames(*slab, kObservation, 0);
      check_frames(*slab, kNextObservation, 1);
      check_frames(*slab, {"action"}, 101);
    }
  }
}

TEST_CASE("a step that is refused between plain ones leaves no trace") {
  for (const std::int64_t envs : {1, 3, 16}) {
    for (const std::int64_t refused : {1, 2, 9, 20}) {  // refused before this step
      CAPTURE(envs);
      CAPTURE(refused);
      Recording plain({.envs = envs}, 20), cast({.envs = envs}, 20);
      cast.as_doubles = true;
      plain.begin();
      cast.begin();
      for (std::int64_t t = 1; t <= 20; ++t) {
        if (t == refused) {
          Array<float> narrow{with_envs(envs, envs > 1, {1}), std::vector<float>(envs, 999)};
          Array<float> observation{with_envs(envs, envs > 1, {2}),
                                   std::vector<float>(2 * envs, 999)};
          Array<std::int64_t> action{with_envs(envs, envs > 1, {}),
                                     std::vector<std::int64_t>(envs, 999)};
          Array<std::uint8_t> ends{{envs}, std::vector<std::uint8_t>(envs, 1)};
          const std::array<ConstTensorView, 1> good{observation.view()}, bad{narrow.view()};
          const std::array<ConstTensorView, 2> outputs{action.view(), narrow.view()};
          const std::array<ConstTensorView, 2> ill{action.view(), action.view()};
          const std::array<ConstTensorView, 1> few{action.view()};
          CHECK_THROWS_AS(
              plain.recorder.step({bad, narrow.view(), ends.view(), ends.view(), outputs}),
              std::invalid_argument);
          CHECK_THROWS_AS(plain.recorder.step({good, narrow.view(), ends.view(), ends.view(), ill}),
                          std::invalid_argument);
          CHECK_THROWS_AS(plain.recorder.step({good, narrow.view(), ends.view(), ends.view(), few}),
                          std::invalid_argument);
          CHECK(plain.recorder.steps_left() == 20 - t + 1);
        }
        step_both(plain, cast, static_cast<float>(t));
        CHECK(was_plain(plain.recorder));
      }
      CHECK(plain.finish().frames == cast.finish().frames);
      check_alike(plain, cast);
      CHECK(plain.recorder.take_episodes().size() == cast.recorder.take_episodes().size());
    }
  }
}

TEST_CASE("an abandoned rollout of plain steps leaves nothing in the next rollout") {
  for (const std::int64_t envs : {1, 3, 16}) {
    for (const std::int64_t before : {0, 1, 5, 19, 20}) {
      CAPTURE(envs);
      CAPTURE(before);
      Recording plain({.envs = envs}, 20), cast({.envs = envs}, 20);
      cast.as_doubles = true;
      for (Recording* recording : {&plain, &cast}) {
        recording->begin();
        for (std::int64_t t = 1; t <= before; ++t) {
          recording->step(static_cast<float>(500 + t));
        }
        recording->recorder.abandon();
        recording->slab.reset();
        recording->restart(0);
        recording->begin();
      }
      for (std::int64_t t = 1; t <= 20; ++t) {
        step_both(plain, cast, static_cast<float>(t));
        CHECK(was_plain(plain.recorder));
      }
      plain.finish();
      cast.finish();
      check_alike(plain, cast);
      for (std::int64_t t = 0; t < 20; ++t) {
        CHECK(plain.number(kNextObservation, t) == static_cast<float>(t + 1));
        CHECK(plain.number(kReward, t) == static_cast<float>(t + 1));
      }
    }
  }
}

TEST_CASE("a stopped rollout of plain steps has nothing after its end") {
  for (const std::int64_t envs : {1, 16}) {
    for (std::int64_t end = 1; end < 40; ++end) {
      CAPTURE(envs);
      CAPTURE(end);
      Recording plain({.envs = envs}, 40), cast({.envs = envs}, 40);
      cast.as_doubles = true;
      const auto stop = std::make_shared<std::atomic<std::uint64_t>>(0);
      const RolloutControl control{.stop = stop, .number = 1};
      plain.begin(0, control);
      cast.begin(0, control);
      for (std::int64_t t = 1; t <= end; ++t) {
        stop->store(t == end ? 1 : 0);
        CHECK((step_both(plain, cast, static_cast<float>(t)) < 0) == (t == end));
      }
      CHECK(plain.finish().frames == end * envs);
      cast.finish();
      check_alike(plain, cast);
      CHECK(plain.integer(kIds, end) == -1);
    }
  }
}
