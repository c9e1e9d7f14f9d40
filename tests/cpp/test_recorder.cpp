#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "recording.h"

using namespace pycollect;
using namespace pycollect::tests;

TEST_CASE("every frame of one env is written to its cell") {
  Recording r({}, 4);
  SUBCASE("passed as arrays") {}
  SUBCASE("passed as numbers") { r.as_numbers = true; }
  r.begin(7);
  CHECK(r.recorder.steps_left() == 4);
  CHECK(r.step(1) == 0);
  CHECK(r.current.values[0] == 1.0F);
  CHECK(r.step(2, {1}) == 1);
  CHECK(r.recorder.done()[0] == 1);
  CHECK(r.current.values[0] == 2.0F);
  r.reset(100);
  CHECK(r.current.values[0] == 100.0F);
  CHECK(r.recorder.done()[0] == 0);
  CHECK(r.step(101) == 0);
  CHECK(r.step(102, {0}, {1}) == 1);
  r.reset(200);  // after the last step of the rollout
  CHECK(r.recorder.steps_left() == 0);
  const RolloutHeader header = r.finish();

  CHECK(header.worker == 3);
  CHECK(header.incarnation == 1);
  CHECK(header.sequence == 2);
  CHECK(header.policy_version == 7);
  CHECK(header.frames == 4);
  CHECK(header.generation == r.slab->generation());
  const std::vector<float> root{0, 1, 100, 101};
  const std::vector<float> next{1, 2, 101, 102};
  const std::vector<std::int64_t> ids{0, 0, 1, 1};
  for (std::int64_t t = 0; t < 4; ++t) {
    const auto i = static_cast<std::size_t>(t);
    CHECK(r.number(kObservation, t) == root[i]);
    CHECK(r.number(kNextObservation, t) == next[i]);
    CHECK(r.number(kReward, t) == next[i]);
    CHECK(r.integer({"action"}, t) == static_cast<std::int64_t>(10 * next[i]));
    CHECK(r.number({"log_prob"}, t) == -next[i]);
    CHECK(r.integer(kIds, t) == ids[i]);
  }
  CHECK(r.flags(kTerminated) == "0100");
  CHECK(r.flags(kTruncated) == "0001");
  CHECK(r.flags(kDone) == "0101");
  for (const char* flag : {"done", "terminated", "truncated"}) {
    CHECK(r.flags({flag}) == "0000");
  }

  r.begin();
  CHECK(r.step(201) == 0);
  CHECK(r.number(kObservation, 0) == 200.0F);
  CHECK(r.integer(kIds, 0) == 2);
  CHECK(r.recorder.frames() == 5);
}

TEST_CASE("each row of a batch of envs has its own episodes") {
  Recording r({.envs = 3}, 3, all_leaves());
  r.begin(5);
  CHECK(r.step(1, {0, 1, 0}, {0, 0, 1}) == 2);
  r.reset(50);
  CHECK(r.step(2) == 0);
  CHECK(r.step(3, {1, 0, 0}) == 1);
  r.reset(60);
  r.finish();

  CHECK(r.flags(kDone, 0) == "001");
  CHECK(r.flags(kDone, 1) == "100");
  CHECK(r.flags(kTruncated, 2) == "100");
  CHECK(r.number(kObservation, 1, 0) == 1.0F);  // not the invalid values of the reset
  CHECK(r.number(kObservation, 1, 1) == 50.0F);
  CHECK(r.number(kObservation, 1, 2) == 50.0F);
  CHECK(r.number(kNextObservation, 0, 1) == 1.0F);  // the true successor
  const std::array<std::array<std::int64_t, 3>, 3> counts{{{0, 1, 2}, {0, 0, 1}, {0, 0, 1}}};
  for (std::int64_t p = 0; p < 3; ++p) {
    for (std::int64_t t = 0; t < 3; ++t) {
      const auto count = counts[static_cast<std::size_t>(p)][static_cast<std::size_t>(t)];
      CHECK(r.integer(kStepCount, t, p) == count);
      CHECK(r.integer(kNextStepCount, t, p) == count + 1);
      CHECK(r.integer(kVersion, t, p) == 5);
      CHECK(r.integer(kIds, t, p) == (p > 0 && t > 0 ? 1 : 0));
    }
    CHECK(r.flags(kMask, p) == "111");
    CHECK(r.current.values[static_cast<std::size_t>(2 * p)] == (p == 0 ? 60.0F : 3.0F));
    CHECK(r.current.values[static_cast<std::size_t>(2 * p + 1)] == static_cast<float>(p));
  }
}

TEST_CASE("a batch of one env keeps its dimension") {
  Recording r({.envs = 1, .batched = true}, 1);
  r.begin();
  CHECK(r.step(1, {1}) == 1);
  r.reset(9);
  CHECK(r.finish().frames == 1);
  CHECK(r.current.values[0] == 9.0F);
}

TEST_CASE("trajectories continue in the next rollout") {
  Recording r({.envs = 2, .batched = true}, 2, all_leaves());
  for (int rollout = 0; rollout < 3; ++rollout) {
    r.begin();
    for (int t = 0; t < 2; ++t) {
      const auto n = static_cast<float>(2 * rollout + t);
      r.step(n + 1);
      CHECK(r.number(kObservation, t, 1) == n);
      CHECK(r.integer(kStepCount, t, 1) == 2 * rollout + t);
      CHECK(r.integer(kIds, t, 1) == 0);
    }
    r.finish();
  }
}

TEST_CASE("an observation that the policy does not read is kept between rollouts") {
  Recording r({}, 2, usual_leaves(), false);
  r.begin();
  r.step(1);
  CHECK(r.current.values[0] == 0.0F);
  r.step(2);
  CHECK(r.current.values[0] == 2.0F);
  r.finish();
  r.begin();
  CHECK(r.number(kObservation, 0) == 2.0F);
}

TEST_CASE("the layout may lack the successor of an observation") {
  std::vector<Leaf> leaves = usual_leaves();
  std::erase_if(leaves, [](const Leaf& leaf) { return leaf.key == kNextObservation; });
  Recording r({}, 2, leaves);
  r.begin();
  r.step(1, {1});
  r.reset(7);
  r.step(8);
  CHECK(r.number(kObservation, 0) == 0.0F);
  CHECK(r.number(kObservation, 1) == 7.0F);
  CHECK(r.current.values[0] == 8.0F);
  r.finish();
}

TEST_CASE("episodes are counted over rollouts") {
  Recording r({.envs = 2, .batched = true}, 2);
  r.begin();
  r.step(1);
  r.step(2);
  r.finish();
  CHECK(r.recorder.take_episodes().empty());
  r.begin();
  r.step(3, {0, 1});
  r.reset(0);
  const std::vector<Episode> episodes = r.recorder.take_episodes();
  REQUIRE(episodes.size() == 1);
  CHECK(episodes[0].env == 1);
  CHECK(episodes[0].length == 3);
  CHECK(episodes[0].total_reward == 6.0);
  CHECK(r.recorder.take_episodes().empty());
}

TEST_CASE("episodes that were taken during a rollout are not returned again at its end") {
  Recording r({}, 2);
  r.begin();
  r.step(1, {1});
  r.reset(0);
  r.step(2);
  r.finish();
  r.begin();
  CHECK(r.recorder.take_episodes().size() == 1);
  r.recorder.abandon();
  CHECK(r.recorder.take_episodes().empty());
}

TEST_CASE("max_frames_per_traj truncates each env separately") {
  Recording r({.envs = 2, .batched = true, .max_frames_per_traj = 3}, 4, all_leaves());
  r.begin();
  CHECK(r.step(1, {1, 0}) == 1);
  r.reset(10);
  CHECK(r.step(2) == 0);
  CHECK(r.step(3) == 1);
  CHECK(r.recorder.done()[1] == 1);
  r.reset(20);
  CHECK(r.step(4, {1, 0}) == 1);  // ended by itself at the maximum length
  r.reset(30);
  r.finish();
  CHECK(r.flags(kTerminated, 0) == "1001");
  CHECK(r.flags(kTruncated, 0) == "0001");
  CHECK(r.flags(kTerminated, 1) == "0000");
  CHECK(r.flags(kTruncated, 1) == "0010");
  CHECK(r.flags(kDone, 1) == "0010");
  CHECK(r.integer(kNextStepCount, 2, 1) == 3);
  CHECK(r.number(kObservation, 3, 1) == 20.0F);
  CHECK(r.recorder.take_episodes().size() == 3);
}

TEST_CASE("the step after a done is an uncollected cell if envs reset themselves") {
  Recording r({.envs = 2, .batched = true, .skips_after_done = true}, 4, all_leaves());
  r.begin(8);
  CHECK(r.step(1, {0, 1}) == 0);  // no env must be reset
  CHECK(r.recorder.done()[1] == 0);
  CHECK(r.step(50, {0, 1}) == 0);  // env 1: the reset observation; its flags are ignored
  CHECK(r.step(51) == 0);
  CHECK(r.step(52, {0, 1}) == 0);
  CHECK(r.finish().frames == 7);
  CHECK(r.recorder.frames() == 7);
  CHECK(r.flags(kMask, 0) == "1111");
  CHECK(r.flags(kMask, 1) == "1011");
  CHECK(r.integer(kIds, 1, 1) == -1);
  for (const Key& key : {kObservation, kNextObservation, kReward, Key{"log_prob"}}) {
    CHECK(r.number(key, 1, 1) == 0.0F);
  }
  CHECK(r.integer({"action"}, 1, 1) == 0);
  CHECK(r.integer(kVersion, 1, 1) == 0);
  CHECK(r.flags(kDone, 1) == "1001");
  CHECK(r.number(kObservation, 2, 1) == 50.0F);
  CHECK(r.integer(kIds, 2, 1) == 1);
  CHECK(r.integer(kStepCount, 2, 1) == 0);
  CHECK(r.integer(kStepCount, 3, 1) == 1);
  const std::vector<Episode> episodes = r.recorder.take_episodes();
  REQUIRE(episodes.size() == 2);
  CHECK(episodes[1].total_reward == 103.0);  // without the reward of the dummy

  r.begin();  // the first cell is the dummy of the last done
  r.step(60);
  r.step(61);
  CHECK(r.integer(kIds, 0, 1) == -1);
  CHECK(r.integer(kIds, 1, 1) == 2);
}

TEST_CASE("set_truncated flags the last collected frame, and the trajectory continues") {
  Recording r({.envs = 2, .batched = true, .skips_after_done = true, .set_truncated = true}, 2,
              all_leaves());
  r.begin();
  r.step(1, {0, 1});
  r.step(2);
  r.finish();
  CHECK(r.flags(kTruncated, 0) == "01");
  CHECK(r.flags(kDone, 0) == "01");
  CHECK(r.flags(kTerminated, 0) == "00");
  CHECK(r.flags(kTruncated, 1) == "10");  // the cell after it is not collected
  CHECK(r.flags(kMask, 1) == "10");
  CHECK(r.recorder.take_episodes().size() == 1);
  r.begin();
  r.step(3);
  CHECK(r.integer(kIds, 0, 0) == 0);
  CHECK(r.integer(kStepCount, 0, 0) == 2);
}

TEST_CASE("restart begins new trajectories without setting flags") {
  Recording r({.envs = 2, .batched = true}, 2);
  r.begin();
  r.step(1);
  r.step(2, {1, 0});
  r.finish();  // env 0 was not reset yet
  r.restart(70);
  CHECK(r.recorder.done()[0] == 0);
  r.begin();
  r.step(71);
  r.step(72);
  r.finish();
  for (std::int64_t p = 0; p < 2; ++p) {
    CHECK(r.number(kObservation, 0, p) == 70.0F);
    CHECK(r.integer(kIds, 0, p) == 1);
    CHECK(r.flags(kDone, p) == "00");
  }
  CHECK(r.recorder.take_episodes().size() == 1);  // a trajectory that was cut is not an episode
}

TEST_CASE("after an abandoned rollout, observations that are not live need a restart") {
  float current = 0;
  const float value = 1;
  const ConstTensorView observation = ConstTensorView::contiguous(&value, DType::float32, {});
  const Layout layout = standard_layout({{"o", DType::float32, {}}}, {});
  const TensorView memory = TensorView::contiguous(&current, DType::float32, {});
  Recorder recorder(layout, {{"o", memory, false}}, {}, {});
  SlabPool pool(Placement(layout, {1, 1, 2}), 1, true);
  recorder.restart({&observation, 1});
  recorder.begin(pool.acquire(), 0, 0);
  recorder.step(OneStep{{&observation, 1}, 0, false, false, {}});
  recorder.abandon();
  CHECK_THROWS_AS(recorder.begin(pool.acquire(), 0, 0), std::logic_error);
  recorder.restart({&observation, 1});
  recorder.begin(pool.acquire(), 0, 0);
  CHECK(recorder.steps_left() == 2);
}

TEST_CASE("an abandoned rollout releases its slab at once") {
  Recording r({}, 3);
  r.begin();
  r.step(1);
  r.slab.reset();
  CHECK(r.pool.stats().lent == 1);
  r.recorder.abandon();
  CHECK(r.pool.stats().lent == 0);
  CHECK(r.recorder.steps_left() == 0);
  r.recorder.abandon();
  r.restart(30);
  r.begin();
  for (float n : {31.0F, 32.0F, 33.0F}) {
    r.step(n);
  }
  CHECK(r.finish().frames == 3);
  CHECK(r.number(kObservation, 0) == 30.0F);
  CHECK(r.pool.stats().created == 1);
}

TEST_CASE("only views own a finished rollout, and a destroyed recorder leaks nothing") {
  std::optional<Recording> r(std::in_place, RecorderOptions{}, 1);
  r->begin();
  r->step(1);
  r->finish();
  CHECK(r->slab.use_count() == 1);
  r->begin();  // destroyed during a rollout
  const std::weak_ptr<Slab> slab = r->slab;
  r.reset();
  CHECK(slab.expired());
}

TEST_CASE("numbers are cast to the types of the layout") {
  std::vector<Leaf> leaves = usual_leaves();
  leaves.push_back({{"pixels"}, DType::float32, {2, 2}});
  leaves.push_back({{"next", "pixels"}, DType::float32, {2, 2}});
  SlabPool pool(Placement(Layout(leaves), {1, 1, 1, Order::stack}), 1, true);
  Array<float> current{{2}, {0, 0}};
  Array<float> pixels{{2, 2}, {0, 0, 0, 0}};
  Recorder recorder(Layout(leaves),
                    {{kObservation, current.view(), true}, {{"pixels"}, pixels.view(), true}},
                    {{"action"}, {"log_prob"}}, {});
  Array<double> wide{{2}, {0.5, 1.5}};
  Array<std::uint8_t> bytes{{2, 2}, {1, 2, 3, 255}};
  TensorView transposed = bytes.view();
  std::swap(transposed.strides[0], transposed.strides[1]);
  const std::array<ConstTensorView, 2> observation{wide.view(), transposed};
  recorder.restart(observation);
  CHECK(current.values == std::vector<float>{0.5F, 1.5F});
  CHECK(pixels.values == std::vector<float>{1, 3, 2, 255});

  const auto slab = pool.acquire();
  recorder.begin(slab, 0, 0);
  Array<std::int32_t> reward{{}, {-3}};
  Array<std::uint8_t> flag{{}, {2}};
  Array<std::int64_t> action{{}, {4}};
  Array<float> log_prob{{1}, {0}};
  const std::array<ConstTensorView, 2> outputs{action.view(), log_prob.view()};
  // A flag of another type is true if it is not zero, and an array of one number is accepted.
  TensorView terminated = flag.view();
  terminated.shape = {1};
  terminated.strides = {1};
  CHECK(recorder.step({observation, reward.view(), terminated, flag.view(), outputs}) == 1);
  recorder.finish();
  const auto first = [&](const Key& key) {
    const auto leaf = static_cast<std::size_t>(slab->placement().layout().find(key));
    return slab->rows(leaf, 0).data;
  };
  float value;
  std::memcpy(&value, first(kReward), sizeof(value));
  CHECK(value == -3.0F);
  CHECK(static_cast<int>(*first(kTerminated)) == 1);
  CHECK(std::memcmp(first({"next", "pixels"}), pixels.values.data(), 16) == 0);
}

TEST_CASE("a wrong array is refused by its key, with the expected and the actual type and shape") {
  Recording r({.envs = 2, .batched = true}, 2);
  r.begin();
  Array<float> observation{{2, 2}, {0, 0, 0, 0}};
  Array<double> reward{{2}, {0, 0}};
  Array<std::uint8_t> flag{{2}, {0, 0}};
  Array<std::int64_t> action{{2}, {0, 0}};
  Array<float> log_prob{{2, 1}, {0, 0}};
  const auto step = [&](TensorView o, TensorView w, TensorView e, TensorView a) {
    const std::array<ConstTensorView, 1> observations{o};
    const std::array<ConstTensorView, 2> outputs{a, log_prob.view()};
    return error_of([&] { r.recorder.step({observations, w, e, flag.view(), outputs}); });
  };
  const TensorView o = observation.view(), w = reward.view(), e = flag.view(), a = action.view();

  Array<float> flat{{4}, {0, 0, 0, 0}};
  const std::string text = step(flat.view(), w, e, a);
  CHECK(text.starts_with("next.observation: "));
  CHECK(contains(text, "[2, 2]"));
  CHECK(contains(text, "[4]"));
  Array<float> three{{3, 2}, {0, 0, 0, 0, 0, 0}};
  CHECK(contains(step(three.view(), w, e, a), "[3, 2]"));
  Array<double> lacking{{1}, {0}};
  CHECK(step(o, lacking.view(), e, a).starts_with("reward: "));
  CHECK(step(o, w, lacking.view(), a).starts_with("terminated: "));
  Array<std::int32_t> narrow{{2}, {0, 0}};
  CHECK(step(o, w, e, narrow.view()).starts_with("action: "));
  Array<std::int64_t> one{{}, {0}};
  CHECK(step(o, w, e, one.view()).starts_with("action: "));

  const std::array<ConstTensorView, 2> two{o, o};
  CHECK_REFUSED(r.recorder.restart(two), "observation", std::invalid_argument);
  const std::array<ConstTensorView, 1> actions{a};
  const std::array<ConstTensorView, 1> observations{o};
  CHECK_REFUSED(r.recorder.step({observations, w, e, e, actions}), "outputs",
                std::invalid_argument);
  const std::array<ConstTensorView, 1> bad{three.view()};
  CHECK_REFUSED(r.recorder.restart(bad), "observation", std::invalid_argument);
  CHECK_REFUSED(r.recorder.reset(bad), "observation", std::invalid_argument);
  CHECK(r.recorder.steps_left() == 2);  // none of the steps was recorded
}

TEST_CASE("a float for an integer leaf is refused") {
  std::vector<Leaf> leaves = usual_leaves();
  leaves[0].dtype = leaves[6].dtype = DType::int64;
  Array<std::int64_t> current{{2}, {0, 0}};
  Recorder recorder(Layout(leaves), {{kObservation, current.view(), true}},
                    {{"action"}, {"log_prob"}}, {});
  Array<float> floats{{2}, {0.5, 1.5}};
  const std::array<ConstTensorView, 1> bad{floats.view()};
  CHECK_REFUSED(recorder.restart(bad), "observation", std::invalid_argument);
  Array<std::int32_t> narrow{{2}, {1, 2}};
  const std::array<ConstTensorView, 1> good{narrow.view()};
  recorder.restart(good);
  CHECK(current.values == std::vector<std::int64_t>{1, 2});
}

TEST_CASE("a recorder's layout must have exactly the leaves that are written") {
  Array<float> current{{2}, {0, 0}};
  const auto make = [&](std::vector<Leaf> leaves, RecorderOptions options = {}) {
    return error_of([&] {
      Recorder recorder(Layout(std::move(leaves)), {{kObservation, current.view(), true}},
                        {{"action"}, {"log_prob"}}, options);
    });
  };
  CHECK(make(usual_leaves()).empty());
  for (std::size_t i = 0; i < usual_leaves().size(); ++i) {
    std::vector<Leaf> leaves = usual_leaves();
    const std::string key = to_string(leaves[i].key);
    if (leaves[i].key == kNextObservation) {  // this leaf may be missing
      continue;
    }
    leaves.erase(leaves.begin() + static_cast<std::ptrdiff_t>(i));
    CHECK(make(leaves).starts_with("layout: "));
    CHECK(contains(make(leaves), key));
  }
  std::vector<Leaf> leaves = usual_leaves();
  leaves.push_back({{"spare"}, DType::float32, {}});
  CHECK(make(leaves).starts_with("layout: "));
  CHECK(contains(make(leaves), "spare"));
  leaves = usual_leaves();
  leaves[6].shape = {3};
  CHECK(make(leaves).starts_with("next.observation: "));
  leaves = usual_leaves();
  leaves[7].dtype = DType::float64;
  CHECK(make(leaves).starts_with("layout: "));
  CHECK(contains(make(leaves), "next.reward"));
  leaves = all_leaves();
  std::erase_if(leaves, [](const Leaf& leaf) { return leaf.key == kNextStepCount; });
  CHECK(make(leaves).empty());
  CHECK(make(usual_leaves(), {.envs = 0}).starts_with("envs: "));
  CHECK(contains(make(usual_leaves(), {.envs = 2}), "[2, 2]"));
  CHECK(contains(make(usual_leaves(), {.batched = true}), "[1, 2]"));
}

TEST_CASE("the numbers of one env are refused for several envs") {
  Recording r({.envs = 2, .batched = true}, 2);
  r.begin();
  r.as_numbers = true;
  CHECK_REFUSED(r.step(1), "step", std::logic_error);
}

TEST_CASE("calls out of order are refused") {
  Array<float> current{{2}, {0, 0}};
  Recorder fresh(Layout(usual_leaves()), {{kObservation, current.view(), true}},
                 {{"action"}, {"log_prob"}}, {});
  Recording r({}, 1);
  CHECK_THROWS_AS(fresh.begin(r.pool.acquire(), 0, 0), std::logic_error);
  CHECK_THROWS_AS(r.step(1), std::logic_error);
  CHECK_THROWS_AS(r.finish(), std::logic_error);
  r.begin();
  CHECK_THROWS_AS(r.finish(), std::logic_error);
  r.step(1);
  CHECK_THROWS_AS(r.step(2), std::logic_error);
  r.finish();
  CHECK_THROWS_AS(r.finish(), std::logic_error);

  SlabPool other(Placement(Layout(all_leaves()), {1, 1, 1, Order::stack}), 1, true);
  CHECK_THROWS_AS(r.recorder.begin(other.acquire(), 0, 0), std::invalid_argument);
  SlabPool wider(Placement(Layout(usual_leaves()), {1, 2, 1, Order::stack}), 1, true);
  CHECK_THROWS_AS(r.recorder.begin(wider.acquire(), 0, 0), std::invalid_argument);
}

namespace {

std::vector<Leaf> leaves_with_rewards(std::int64_t objectives) {
  std::vector<Leaf> leaves = usual_leaves();
  for (Leaf& leaf : leaves) {
    if (leaf.key == kReward) {
      leaf.shape = {objectives};
    }
  }
  return leaves;
}

float objective(const Recording& r, std::int64_t k, std::int64_t t, std::int64_t p) {
  const TensorView rows =
      r.slab->rows(static_cast<std::size_t>(r.slab->placement().layout().find(kReward)), 0);
  float value = 0;
  std::memcpy(&value, rows.data + p * rows.strides[0] + t * rows.strides[1] + 4 * k, sizeof(value));
  return value;
}

}  // namespace

TEST_CASE("several rewards per step have a return each") {
  RecorderOptions options;
  std::int64_t objectives = 3;
  SUBCASE("one env") {}
  SUBCASE("one env in a batch") { options.batched = true; }
  SUBCASE("envs") { options.envs = 3; }
  SUBCASE("many envs, a window") {
    options.envs = 20;
    objectives = 2;
  }
  SUBCASE("with cut trajectories") {
    options.envs = 2;
    options.max_frames_per_traj = 50;
  }
  SUBCASE("with dummies") {
    options.envs = 2;
    options.skips_after_done = true;
  }
  SUBCASE("with dummies left out") {
    options.envs = 9;
    options.skips_after_done = options.leaves_out_dummies = true;
  }
  Recording r(options, 4, leaves_with_rewards(objectives));
  r.objectives = objectives;
  const auto last = static_cast<std::size_t>(options.envs - 1);
  std::vector<std::uint8_t> ends(last + 1);
  ends[last] = 1;
  r.begin();
  r.step(1);
  if (r.step(2, ends) != 0) {
    r.reset(100);
  }
  for (float n = 101; r.recorder.steps_left() > 0; ++n) {
    r.step(n);
  }
  r.finish();
  for (std::int64_t p = 0; p < r.P; ++p) {
    for (std::int64_t k = 0; k < objectives; ++k) {
      CHECK(objective(r, k, 0, p) == 1.0F + 100.0F * static_cast<float>(k));
      CHECK(objective(r, k, 1, p) == 2.0F + 100.0F * static_cast<float>(k));
    }
  }
  const std::vector<Episode> episodes = r.recorder.take_episodes();
  REQUIRE(episodes.size() == 1);
  CHECK(episodes[0].length == 2);
  double sum = 0;
  for (std::size_t k = 0; k < static_cast<std::size_t>(objectives); ++k) {
    CHECK(episodes[0].objectives.at(k) == 3.0 + 200.0 * static_cast<double>(k));
    sum += episodes[0].objectives[k];
  }
  CHECK(episodes[0].total_reward == sum);
}

TEST_CASE("a wrong number of rewards is refused, and the step can be repeated") {
  RecorderOptions options;
  SUBCASE("one env") {}
  SUBCASE("envs") { options.envs = 3; }
  Recording r(options, 2, leaves_with_rewards(3));
  r.begin();
  for (const std::int64_t wrong : {1, 2, 4}) {
    r.objectives = wrong;
    CHECK(error_of([&] { r.step(9); }).starts_with("reward: "));
  }
  if (options.envs == 1) {
    r.as_numbers = true;
    CHECK_THROWS_AS(r.step(9), std::logic_error);
    r.as_numbers = false;
  }
  r.objectives = 3;
  CHECK(r.step(1) == 0);
  CHECK(objective(r, 2, 0, 0) == 201.0F);
}
