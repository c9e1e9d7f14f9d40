#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pycollect/recorder.h"
#include "pycollect/slab_pool.h"

using namespace pycollect;

namespace {

const Key kObservation{"observation"};
const Key kNextObservation{"next", "observation"};
const Key kReward{"next", "reward"};
const Key kDone{"next", "done"};
const Key kTerminated{"next", "terminated"};
const Key kTruncated{"next", "truncated"};
const Key kIds{"collector", "traj_ids"};
const Key kVersion{"collector", "policy_version"};
const Key kMask{"collector", "mask"};
const Key kStepCount{"step_count"};
const Key kNextStepCount{"next", "step_count"};

// An observation of two numbers, a discrete action and a log-probability.
std::vector<Leaf> usual_leaves() {
  return {{kObservation, DType::float32, {2}},
          {{"action"}, DType::int64, {}},
          {{"log_prob"}, DType::float32, {1}},
          {{"done"}, DType::boolean, {1}},
          {{"terminated"}, DType::boolean, {1}},
          {{"truncated"}, DType::boolean, {1}},
          {kNextObservation, DType::float32, {2}},
          {kReward, DType::float32, {1}},
          {kDone, DType::boolean, {1}},
          {kTerminated, DType::boolean, {1}},
          {kTruncated, DType::boolean, {1}},
          {kIds, DType::int64, {}}};
}

std::vector<Leaf> all_leaves() {
  std::vector<Leaf> leaves = usual_leaves();
  leaves.push_back({kStepCount, DType::int64, {1}});
  leaves.push_back({kNextStepCount, DType::int64, {1}});
  leaves.push_back({kVersion, DType::int64, {}});
  leaves.push_back({kMask, DType::boolean, {}});
  return leaves;
}

template <typename T>
constexpr DType kDType = DType::float32;
template <>
constexpr DType kDType<double> = DType::float64;
template <>
constexpr DType kDType<std::int64_t> = DType::int64;
template <>
constexpr DType kDType<std::int32_t> = DType::int32;
template <>
constexpr DType kDType<std::uint8_t> = DType::uint8;

// An array of numbers, in memory that ends where they end.
template <typename T>
struct Array {
  Dims shape;
  std::vector<T> values;

  TensorView view() { return TensorView::contiguous(values.data(), kDType<T>, shape); }
};

Dims with_envs(std::int64_t envs, bool batched, const Dims& frame) {
  Dims shape;
  if (batched) {
    shape.push_back(envs);
  }
  for (std::int64_t extent : frame) {
    shape.push_back(extent);
  }
  return shape;
}

// Environments that count: env p of step n observes (n, p); what ends is told to each step.
class Recording {
 public:
  Recording(RecorderOptions options, std::int64_t steps, std::vector<Leaf> leaves = usual_leaves(),
            bool live = true)
      : P(options.envs),
        batched(options.batched),
        pool(Placement(Layout(leaves), {1, P, steps, Order::stack}), 1, true),
        current{with_envs(P, batched, {2}), std::vector<float>(static_cast<std::size_t>(2 * P))},
        recorder(Layout(leaves), {{kObservation, current.view(), live}}, {{"action"}, {"log_prob"}},
                 options) {
    restart(0);
  }

  void restart(float n) {
    auto observation = observe(n);
    const std::array views{observation.view()};
    recorder.restart(views);
  }

  void begin(std::int64_t version = 0, RolloutControl control = {}, std::int64_t steps = 0) {
    slab = pool.acquire();
    recorder.begin(slab, 0, version, std::move(control), steps);
  }

  // A step of every env to observation n, with reward n.
  std::int64_t step(float n, std::vector<std::uint8_t> terminated = {},
                    std::vector<std::uint8_t> truncated = {}) {
    const auto count = static_cast<std::size_t>(P);
    terminated.resize(count);
    truncated.resize(count);
    auto observation = observe(n);
    Array<double> reward{with_envs(P, batched, {}), std::vector<double>(count, n)};
    Array<std::uint8_t> ends{with_envs(P, batched, {}), terminated};
    Array<std::uint8_t> cuts{with_envs(P, batched, {}), truncated};
    Array<std::int64_t> action{with_envs(P, batched, {}),
                               std::vector<std::int64_t>(count, static_cast<std::int64_t>(10 * n))};
    Array<float> log_prob{with_envs(P, batched, {1}), std::vector<float>(count, -n)};
    const std::array observations{observation.view()};
    const std::array outputs{action.view(), log_prob.view()};
    if (as_numbers) {
      return recorder.step(
          OneStep{observations, n, terminated[0] != 0, truncated[0] != 0, outputs});
    }
    return recorder.step({observations, reward.view(), ends.view(), cuts.view(), outputs});
  }

  // The envs that are done are reset to observation n; the other rows hold nonsense.
  void reset(float n) {
    auto observation = observe(n);
    const auto done = recorder.done();
    for (std::size_t p = 0; p < done.size(); ++p) {
      if (done[p] == 0) {
        observation.values[2 * p] = observation.values[2 * p + 1] = -999;
      }
    }
    const std::array views{observation.view()};
    recorder.reset(views);
  }

  RolloutHeader finish() { return recorder.finish(3, 1, 2); }

  template <typename T>
  T at(const Key& key, std::int64_t t, std::int64_t p = 0) const {
    const int leaf = slab->placement().layout().find(key);
    REQUIRE(leaf >= 0);
    const TensorView rows = slab->rows(static_cast<std::size_t>(leaf), 0);
    T value;
    std::memcpy(&value, rows.data + p * rows.strides[0] + t * rows.strides[1], sizeof(T));
    return value;
  }
  float number(const Key& key, std::int64_t t, std::int64_t p = 0) const {
    return at<float>(key, t, p);
  }
  std::int64_t integer(const Key& key, std::int64_t t, std::int64_t p = 0) const {
    return at<std::int64_t>(key, t, p);
  }
  // The value of a flag over time, e.g. "001".
  std::string flags(const Key& key, std::int64_t p = 0) const {
    std::string text;
    for (std::int64_t t = 0; t < slab->placement().geometry().steps; ++t) {
      text += std::to_string(at<std::uint8_t>(key, t, p));
    }
    return text;
  }

  const std::int64_t P;
  const bool batched;
  bool as_numbers = false;  // steps are given as OneStep
  SlabPool pool;
  Array<float> current;
  Recorder recorder;
  std::shared_ptr<Slab> slab;

 private:
  Array<float> observe(float n) const {
    Array<float> result{with_envs(P, batched, {2}), {}};
    for (std::int64_t p = 0; p < P; ++p) {
      result.values.push_back(n);
      result.values.push_back(static_cast<float>(p));
    }
    return result;
  }
};

template <typename Function>
std::string error_of(Function&& function) {
  try {
    function();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("one env: every frame stands where it belongs") {
  Recording r({}, 4);
  SUBCASE("given as arrays") {}
  SUBCASE("given as numbers") { r.as_numbers = true; }
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

TEST_CASE("a batch of envs: each row has its own episodes") {
  Recording r({.envs = 3, .batched = true}, 3, all_leaves());
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
  CHECK(r.number(kObservation, 1, 0) == 1.0F);  // not the reset's nonsense
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

TEST_CASE("trajectories go on in the next rollout") {
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

TEST_CASE("an observation may have no successor of its own in the batch") {
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

TEST_CASE("max_frames_per_traj truncates each env on its own") {
  Recording r({.envs = 2, .batched = true, .max_frames_per_traj = 3}, 4, all_leaves());
  r.begin();
  CHECK(r.step(1, {1, 0}) == 1);
  r.reset(10);
  CHECK(r.step(2) == 0);
  CHECK(r.step(3) == 1);
  CHECK(r.recorder.done()[1] == 1);
  r.reset(20);
  CHECK(r.step(4, {1, 0}) == 1);  // as long as it may be, but it ended by itself
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

TEST_CASE("the step after a done is an uncollected cell where envs reset by themselves") {
  Recording r({.envs = 2, .batched = true, .skips_after_done = true}, 4, all_leaves());
  r.begin(8);
  CHECK(r.step(1, {0, 1}) == 0);  // nothing is to be reset
  CHECK(r.recorder.done()[1] == 0);
  CHECK(r.step(50, {0, 1}) == 0);  // env 1: the reset observation; its flags mean nothing
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
  CHECK(episodes[1].total_reward == 103.0);  // the dummy's reward is not in it

  r.begin();  // the dummy of the last done is the first cell here
  r.step(60);
  r.step(61);
  CHECK(r.integer(kIds, 0, 1) == -1);
  CHECK(r.integer(kIds, 1, 1) == 2);
}

TEST_CASE("set_truncated flags the last collected frame, and the trajectory goes on") {
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

TEST_CASE("restart begins new trajectories and flags nothing") {
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
  CHECK(r.recorder.take_episodes().size() == 1);  // a trajectory that was cut is no episode
}

TEST_CASE("an abandoned rollout gives its slab back at once") {
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

TEST_CASE("a finished rollout belongs to its views alone, and a recorder's end leaks nothing") {
  std::optional<Recording> r(std::in_place, RecorderOptions{}, 1);
  r->begin();
  r->step(1);
  r->finish();
  CHECK(r->slab.use_count() == 1);
  r->begin();  // its end comes in the middle of a rollout
  const std::weak_ptr<Slab> slab = r->slab;
  r.reset();
  CHECK(slab.expired());
}

TEST_CASE("numbers are cast to what the layout says") {
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
  const std::array observation{wide.view(), transposed};
  recorder.restart(observation);
  CHECK(current.values == std::vector<float>{0.5F, 1.5F});
  CHECK(pixels.values == std::vector<float>{1, 3, 2, 255});

  const auto slab = pool.acquire();
  recorder.begin(slab, 0, 0);
  Array<std::int32_t> reward{{}, {-3}};
  Array<std::uint8_t> flag{{}, {2}};
  Array<std::int64_t> action{{}, {4}};
  Array<float> log_prob{{1}, {0}};
  const std::array outputs{action.view(), log_prob.view()};
  // A flag of another type is true where it is not zero; an array of one number is one, too.
  TensorView terminated = flag.view();
  terminated.shape = {1};
  terminated.strides = {1};
  CHECK(recorder.step({observation, reward.view(), terminated, flag.view(), outputs}) == 1);
  recorder.finish(0, 0, 0);
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

TEST_CASE("a wrong array is refused, by its key, with what was expected and what came") {
  Recording r({.envs = 2, .batched = true}, 2);
  r.begin();
  Array<float> observation{{2, 2}, {0, 0, 0, 0}};
  Array<double> reward{{2}, {0, 0}};
  Array<std::uint8_t> flag{{2}, {0, 0}};
  Array<std::int64_t> action{{2}, {0, 0}};
  Array<float> log_prob{{2, 1}, {0, 0}};
  const auto step = [&](TensorView o, TensorView w, TensorView e, TensorView a) {
    const std::array observations{o};
    const std::array outputs{a, log_prob.view()};
    return error_of([&] { r.recorder.step({observations, w, e, flag.view(), outputs}); });
  };
  const TensorView o = observation.view(), w = reward.view(), e = flag.view(), a = action.view();

  Array<float> flat{{4}, {0, 0, 0, 0}};
  std::string text = step(flat.view(), w, e, a);
  CHECK(contains(text, "next.observation: expected float32 of shape [2, 2], got float32"));
  CHECK(contains(text, "[4]"));
  Array<float> three{{3, 2}, {0, 0, 0, 0, 0, 0}};
  CHECK(contains(step(three.view(), w, e, a), "got float32 of shape [3, 2]"));
  Array<double> lacking{{1}, {0}};
  CHECK(contains(step(o, lacking.view(), e, a), "reward: expected one number for each of 2 envs"));
  CHECK(contains(step(o, w, lacking.view(), a), "terminated: expected one number"));
  Array<std::int32_t> narrow{{2}, {0, 0}};
  CHECK(contains(step(o, w, e, narrow.view()), "action: expected int64 of shape [2], got int32"));
  Array<std::int64_t> one{{}, {0}};
  CHECK(contains(step(o, w, e, one.view()), "action: expected int64 of shape [2], got int64 of"));

  const std::array two{o, o};
  CHECK(contains(error_of([&] { r.recorder.restart(two); }), "observation: expected 1 arrays"));
  const std::array actions{a};
  const std::array observations{o};
  CHECK(contains(error_of([&] { r.recorder.step({observations, w, e, e, actions}); }),
                 "outputs: expected 2 arrays, got 1"));
  const std::array bad{three.view()};
  CHECK(contains(error_of([&] { r.recorder.restart(bad); }), "observation: expected float32"));
  CHECK(contains(error_of([&] { r.recorder.reset(bad); }), "observation: expected float32"));
  CHECK(r.recorder.steps_left() == 2);  // none of these was recorded
}

TEST_CASE("a float where integers are promised is refused") {
  std::vector<Leaf> leaves = usual_leaves();
  leaves[0].dtype = leaves[6].dtype = DType::int64;
  Array<std::int64_t> current{{2}, {0, 0}};
  Recorder recorder(Layout(leaves), {{kObservation, current.view(), true}},
                    {{"action"}, {"log_prob"}}, {});
  Array<float> floats{{2}, {0.5, 1.5}};
  const std::array bad{floats.view()};
  CHECK(contains(error_of([&] { recorder.restart(bad); }), "expected int64 of shape [2], got"));
  Array<std::int32_t> narrow{{2}, {1, 2}};
  const std::array good{narrow.view()};
  recorder.restart(good);
  CHECK(current.values == std::vector<std::int64_t>{1, 2});
}

TEST_CASE("a recorder's layout has what a batch has, and nothing more") {
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
    if (leaves[i].key == kNextObservation) {  // the one that may be missing
      continue;
    }
    leaves.erase(leaves.begin() + static_cast<std::ptrdiff_t>(i));
    CHECK(contains(make(leaves), "expected a leaf " + key));
  }
  std::vector<Leaf> leaves = usual_leaves();
  leaves.push_back({{"nobody"}, DType::float32, {}});
  CHECK(contains(make(leaves), "leaves that the recorder writes, got 13"));
  CHECK(contains(make(usual_leaves(), {.envs = 0, .batched = true}), "envs: expected"));
  CHECK(contains(make(usual_leaves(), {.envs = 2}), "envs: expected 1 where not batched"));
  CHECK(contains(make(usual_leaves(), {.envs = 2, .batched = true}), "of shape [2, 2]"));
}

TEST_CASE("the numbers of one env are refused where there are several") {
  Recording r({.envs = 2, .batched = true}, 2);
  r.begin();
  r.as_numbers = true;
  CHECK_THROWS_WITH_AS(r.step(1), "step: expected arrays of 2 envs, got the numbers of one",
                       std::logic_error);
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

TEST_CASE("rows of several workers share a slab, in either order of memory") {
  for (Order order : {Order::stack, Order::time}) {
    SlabPool pool(Placement(Layout(usual_leaves()), {2, 2, 3, order}), 1, true);
    const auto slab = pool.acquire();
    for (std::int64_t row : {1, 0}) {
      Recording r({.envs = 2, .batched = true}, 3);
      r.recorder.begin(slab, row, row);
      for (int t = 1; t <= 3; ++t) {
        r.step(static_cast<float>(100 * row + t));
      }
      r.finish();
    }
    const auto leaf = static_cast<std::size_t>(slab->placement().layout().find(kNextObservation));
    for (std::int64_t row = 0; row < 2; ++row) {
      CHECK(read_header({slab->data(), static_cast<std::size_t>(slab->bytes())}, slab->placement(),
                        row)
                .policy_version == row);
      const TensorView rows = slab->rows(leaf, row);
      for (std::int64_t p = 0; p < 2; ++p) {
        for (std::int64_t t = 0; t < 3; ++t) {
          std::array<float, 2> frame;
          std::memcpy(frame.data(), rows.data + p * rows.strides[0] + t * rows.strides[1], 8);
          CHECK(frame[0] == static_cast<float>(100 * row + t + 1));
          CHECK(frame[1] == static_cast<float>(p));
        }
      }
    }
  }
}

TEST_CASE("a rollout that is stopped ends with the step that is being recorded") {
  for (bool live : {true, false}) {
    Recording r({.envs = 2, .batched = true, .set_truncated = true}, 5, all_leaves(), live);
    const SharedNumber stop = std::make_shared<std::atomic<std::uint64_t>>(6);
    const SharedNumber steps = std::make_shared<std::atomic<std::uint64_t>>(0);
    r.begin(4, {stop, 7, 2, steps});
    CHECK(r.step(1) == 0);
    CHECK(r.step(2) == 0);
    stop->store(7);
    CHECK(r.step(3, {0, 1}) == -2);  // one env is to be reset, and this is the end
    r.reset(50);
    CHECK(steps->load() == 3);
    CHECK(r.recorder.steps_left() == 0);
    CHECK_THROWS_AS(r.step(4), std::logic_error);
    const RolloutHeader header = r.finish();

    CHECK(header.frames == 6);
    CHECK(header.steps == 5);
    const std::span bytes(r.slab->data(), static_cast<std::size_t>(r.slab->bytes()));
    CHECK(read_lengths(bytes, r.slab->placement(), 0) == std::vector<std::int64_t>{3, 3});
    for (std::int64_t p = 0; p < 2; ++p) {
      CHECK(r.flags(kMask, p) == "11100");
      CHECK(r.flags(kTruncated, p) == "00100");
      CHECK(r.integer(kIds, 2, p) == 0);
      for (std::int64_t t : {3, 4}) {
        CHECK(r.integer(kIds, t, p) == -1);
        CHECK(r.integer(kNextStepCount, t, p) == 0);
        CHECK(r.number(kObservation, t, p) == 0.0F);
        CHECK(r.number(kNextObservation, t, p) == 0.0F);
      }
    }

    r.begin();  // it goes on where it stood
    CHECK(r.number(kObservation, 0, 0) == 3.0F);
    CHECK(r.number(kObservation, 0, 1) == 50.0F);
    for (float n = 4; n < 9; ++n) {
      CHECK(r.step(n) == 0);
    }
    CHECK(r.integer(kIds, 0, 0) == 0);
    CHECK(r.integer(kIds, 0, 1) == 1);
    CHECK(r.finish().frames == 10);
  }
}

TEST_CASE("a rollout may have fewer steps than the slab") {
  Recording r({.envs = 2, .batched = true, .set_truncated = true}, 4, all_leaves());
  r.begin(1, {}, 2);
  CHECK(r.recorder.steps_left() == 2);
  CHECK(r.step(1) == 0);
  CHECK(r.step(2) == 0);
  CHECK_THROWS_AS(r.step(3), std::logic_error);
  CHECK(r.finish().frames == 4);
  const std::span bytes(r.slab->data(), static_cast<std::size_t>(r.slab->bytes()));
  CHECK(read_lengths(bytes, r.slab->placement(), 0) == std::vector<std::int64_t>{2, 2});
  for (std::int64_t p = 0; p < 2; ++p) {
    CHECK(r.flags(kMask, p) == "1100");
    CHECK(r.flags(kTruncated, p) == "0100");
    CHECK(r.integer(kIds, 3, p) == -1);
    CHECK(r.number(kObservation, 2, p) == 0.0F);
  }
  r.begin();
  CHECK(r.number(kObservation, 0, 1) == 2.0F);
  CHECK_THROWS_AS(r.begin(0, {}, 5), std::invalid_argument);
  CHECK_THROWS_AS(r.begin(0, {}, -1), std::invalid_argument);
}

TEST_CASE("a stopped rollout has at least one step, and as many as it must have") {
  Recording r({}, 4, all_leaves());
  const SharedNumber stop = std::make_shared<std::atomic<std::uint64_t>>(1);
  r.begin(0, {stop, 1});
  CHECK(r.step(1) == -1);
  CHECK(r.finish().frames == 1);
  r.begin(0, {stop, 1, 3});
  CHECK(r.step(2) == 0);
  CHECK(r.step(3) == 0);
  CHECK(r.step(4) == -1);
  CHECK(r.finish().frames == 3);
  r.begin(0, {stop, 1, 4});  // stopped where it ends anyhow
  for (float n = 5; n < 9; ++n) {
    CHECK(r.step(n) == 0);
  }
  CHECK(r.finish().frames == 4);
  r.begin(0, {stop, 1});
  r.recorder.abandon();
  r.begin();
  CHECK(r.step(10) == 0);
}
