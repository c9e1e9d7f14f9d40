// Recurrent states, is_init, and environments with their own leaves for rewards and flags.
#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "pycollect/recorder.h"
#include "pycollect/slab_pool.h"

using namespace pycollect;

namespace {

constexpr std::int64_t kEnvs = 2;
constexpr std::int64_t kSteps = 3;

template <typename T>
TensorView view_of(std::vector<T>& values, DType dtype, const Dims& shape) {
  return TensorView::contiguous(values.data(), dtype, shape);
}

std::string row(const Slab& slab, const Key& key, std::int64_t env) {
  const auto leaf = static_cast<std::size_t>(slab.placement().layout().find(key));
  const TensorView rows = slab.rows(leaf, 0);
  std::string text;
  for (std::int64_t t = 0; t < kSteps; ++t) {
    const std::byte* cell = rows.data + env * rows.strides[0] + t * rows.strides[1];
    float number = 0;
    if (rows.dtype == DType::boolean) {
      number = static_cast<float>(*reinterpret_cast<const std::uint8_t*>(cell));
    } else {
      std::memcpy(&number, cell, sizeof(number));
    }
    text += std::to_string(static_cast<int>(number)) + " ";
  }
  return text;
}

// These leaves with reward, ids and flags.
std::vector<Leaf> with_standard(std::vector<Leaf> leaves = {}) {
  leaves.push_back({{"next", "reward"}, DType::float32, {1}});
  leaves.push_back({{"collector", "traj_ids"}, DType::int64, {}});
  for (const char* flag : {"done", "terminated", "truncated"}) {
    leaves.push_back({{flag}, DType::boolean, {1}});
    leaves.push_back({{"next", flag}, DType::boolean, {1}});
  }
  return leaves;
}

// Two environments, an observation, a state that starts at 7, and is_init. If "x" or "h" is among
// `outputs`, the policy writes the root leaf: ten times the observation (twice), or a hundred times
// the state.
struct Recurrent {
  std::vector<float> observation{0, 0}, state{0, 0}, initial{7};
  std::vector<std::uint8_t> is_init{0, 0};
  std::vector<Key> outputs;
  SlabPool pool;
  Recorder recorder;
  std::shared_ptr<Slab> slab;

  static Layout layout(bool rewrites) {
    return Layout(with_standard({{{"x"}, DType::float32, {rewrites ? 2 : 1}},
                                 {{"next", "x"}, DType::float32, {1}},
                                 {{"h"}, DType::float32, {1}},
                                 {{"next", "h"}, DType::float32, {1}},
                                 {{"is_init"}, DType::boolean, {1}}}));
  }

  explicit Recurrent(bool skips, const std::vector<Key>& outputs = {})
      : outputs(outputs),
        pool(Placement(layout(!outputs.empty()), {1, kEnvs, kSteps}), 1, true),
        recorder(layout(!outputs.empty()),
                 {{{"x"}, view_of(observation, DType::float32, {kEnvs, 1})}}, outputs,
                 RecorderOptions{.envs = kEnvs, .batched = true, .skips_after_done = skips},
                 {{{"h"},
                   view_of(state, DType::float32, {kEnvs, 1}),
                   view_of(initial, DType::float32, {1})}},
                 view_of(is_init, DType::boolean, {kEnvs, 1})) {
    std::vector<float> first{100, 200};
    const std::array<ConstTensorView, 1> views{view_of(first, DType::float32, {kEnvs, 1})};
    recorder.restart(views);
    slab = pool.acquire();
    recorder.begin(slab, 0, 0);
  }

  std::int64_t step(float h, std::vector<std::uint8_t> ends) {
    std::vector<float> x{h, h}, hidden{h, h}, reward{0, 0};
    std::vector<std::uint8_t> cuts{0, 0};
    const std::array<ConstTensorView, 1> observations{view_of(x, DType::float32, {kEnvs, 1})};
    const std::array<ConstTensorView, 1> states{view_of(hidden, DType::float32, {kEnvs, 1})};
    std::vector<float> tenfold, hundredfold;
    for (std::size_t p = 0; p < kEnvs; ++p) {
      tenfold.insert(tenfold.end(), 2, 10 * observation[p]);
      hundredfold.push_back(100 * state[p]);
    }
    std::vector<ConstTensorView> written{view_of(tenfold, DType::float32, {kEnvs, 2}),
                                         view_of(hundredfold, DType::float32, {kEnvs, 1})};
    written.resize(outputs.size());
    return recorder.step({observations, view_of(reward, DType::float32, {kEnvs}),
                          view_of(ends, DType::boolean, {kEnvs}),
                          view_of(cuts, DType::boolean, {kEnvs}), written, states});
  }

  void reset() {
    std::vector<float> first{300, 400};
    const std::array<ConstTensorView, 1> views{view_of(first, DType::float32, {kEnvs, 1})};
    recorder.reset(views);
  }
};

}  // namespace

TEST_CASE("a state is carried to the next step, and reset with each trajectory") {
  Recurrent r(false);
  CHECK(r.state == std::vector<float>{7, 7});
  CHECK(r.is_init == std::vector<std::uint8_t>{1, 1});
  CHECK(r.step(1, {0, 1}) == 1);
  r.reset();
  CHECK(r.state == std::vector<float>{1, 7});
  CHECK(r.is_init == std::vector<std::uint8_t>{0, 1});
  r.step(2, {0, 0});
  r.step(3, {1, 0});
  r.reset();
  r.recorder.finish();
  CHECK(row(*r.slab, {"h"}, 0) == "7 1 2 ");
  CHECK(row(*r.slab, {"next", "h"}, 0) == "1 2 3 ");
  CHECK(row(*r.slab, {"h"}, 1) == "7 7 2 ");
  CHECK(row(*r.slab, {"is_init"}, 0) == "1 0 0 ");
  CHECK(row(*r.slab, {"is_init"}, 1) == "1 1 0 ");
  // The reset after the last step appears in the next rollout.
  auto next = r.pool.acquire();
  r.recorder.begin(next, 0, 0);
  r.step(4, {0, 0});
  r.step(5, {0, 0});
  r.step(6, {0, 0});
  r.recorder.finish({.sequence = 1});
  CHECK(row(*next, {"h"}, 0) == "7 4 5 ");
  CHECK(row(*next, {"h"}, 1) == "3 4 5 ");
  CHECK(row(*next, {"is_init"}, 0) == "1 0 0 ");
  CHECK(row(*next, {"is_init"}, 1) == "0 0 0 ");
}

TEST_CASE("is_init marks only first steps, in every rollout, for few and many environments") {
  constexpr std::int64_t kMostSteps = 70;
  const Layout layout(with_standard({{{"x"}, DType::float32, {1}},
                                     {{"next", "x"}, DType::float32, {1}},
                                     {{"is_init"}, DType::boolean, {1}}}));
  for (const std::int64_t envs : {2, 8, 33}) {
    const auto count = static_cast<std::size_t>(envs);
    std::vector<float> x(count), reward(count);
    std::vector<std::uint8_t> is_init(count), ends(count), cuts(count), expected(count, 1);
    const TensorView seen = view_of(x, DType::float32, {envs, 1});
    const std::array<ConstTensorView, 1> observation{seen};
    SlabPool pool(Placement(layout, {1, envs, kMostSteps}), 1, true);
    Recorder recorder(layout, {{{"x"}, seen}}, {}, RecorderOptions{.envs = envs}, {},
                      view_of(is_init, DType::boolean, {envs, 1}));
    recorder.restart(observation);
    std::int64_t n = 0;
    for (const std::int64_t steps : {3, 70, 16, 65, 9}) {
      const std::shared_ptr<Slab> slab = pool.acquire();
      const TensorView marks = slab->rows(static_cast<std::size_t>(layout.find(Key{"is_init"})), 0);
      recorder.begin(slab, 0, 0, {}, steps);
      std::vector<std::vector<std::uint8_t>> wanted;
      for (std::int64_t t = 0; t < steps; ++t, ++n) {
        wanted.push_back(expected);
        for (std::size_t p = 0; p < count; ++p) {
          ends[p] = expected[p] = (n * 5 + static_cast<std::int64_t>(p) * 3) % 7 == 0;
        }
        if (recorder.step({observation,
                           view_of(reward, DType::float32, {envs}),
                           view_of(ends, DType::boolean, {envs}),
                           view_of(cuts, DType::boolean, {envs}),
                           {}}) > 0) {
          recorder.reset(observation);
        }
      }
      recorder.finish();
      for (std::int64_t p = 0; p < envs; ++p) {
        for (std::int64_t t = 0; t < kMostSteps; ++t) {
          INFO("env ", p, " of ", envs, " at step ", t, " of ", steps);
          const bool is_marked = *marks[p][t].as<bool>();
          CHECK(
              is_marked ==
              (t < steps && wanted[static_cast<std::size_t>(t)][static_cast<std::size_t>(p)] != 0));
        }
      }
    }
  }
}

TEST_CASE("an output with an input's key is the root leaf, with its own dtype and shape") {
  Recurrent r(false, {{"x"}, {"h"}});
  CHECK(r.step(1, {0, 1}) == 1);
  r.reset();
  CHECK(r.observation == std::vector<float>{1, 400});
  CHECK(r.state == std::vector<float>{1, 7});
  r.step(2, {0, 0});
  r.step(3, {1, 0});
  r.reset();
  r.recorder.finish();
  CHECK(row(*r.slab, {"x"}, 0) == "1000 10 20 ");
  CHECK(row(*r.slab, {"x"}, 1) == "2000 4000 20 ");
  CHECK(row(*r.slab, {"next", "x"}, 1) == "1 2 3 ");
  CHECK(row(*r.slab, {"h"}, 0) == "700 100 200 ");
  CHECK(row(*r.slab, {"h"}, 1) == "700 700 200 ");
  CHECK(row(*r.slab, {"next", "h"}, 1) == "1 2 3 ");
  CHECK(r.observation == std::vector<float>{300, 3});
}

TEST_CASE("a state is reset after an uncollected cell") {
  Recurrent r(true);
  CHECK(r.step(1, {0, 1}) == 0);
  r.step(2, {0, 0});  // env 1's dummy
  CHECK(r.state == std::vector<float>{2, 7});
  r.step(3, {0, 0});
  r.recorder.finish();
  CHECK(row(*r.slab, {"h"}, 1) == "7 0 7 ");
  CHECK(row(*r.slab, {"is_init"}, 1) == "1 0 1 ");
  CHECK(row(*r.slab, {"x"}, 1) == "200 0 2 ");
}

TEST_CASE("a state that is not recorded is only carried, and must have no leaf") {
  const std::vector<Leaf> plain = with_standard();
  std::vector<std::int64_t> ticket{5, 5}, none{0}, passed_on{3, 4};
  const RecorderOptions options{.envs = kEnvs, .batched = true};
  const StateSpec carried{{"ticket"},
                          view_of(ticket, DType::int64, {kEnvs}),
                          view_of(none, DType::int64, {1})[0],
                          false};
  Recorder recorder(Layout(plain), {}, {}, options, {carried});
  recorder.restart({});
  CHECK(ticket == std::vector<std::int64_t>{0, 0});
  SlabPool pool(Placement(Layout(plain), {1, kEnvs, kSteps}), 1, true);
  recorder.begin(pool.acquire(), 0, 0);
  std::vector<float> reward{0, 0};
  std::vector<std::uint8_t> ends{0, 1}, cuts{0, 0};
  const std::array<ConstTensorView, 1> states{view_of(passed_on, DType::int64, {kEnvs})};
  CHECK(recorder.step({{},
                       view_of(reward, DType::float32, {kEnvs}),
                       view_of(ends, DType::boolean, {kEnvs}),
                       view_of(cuts, DType::boolean, {kEnvs}),
                       {},
                       states}) == 1);
  CHECK(ticket == std::vector<std::int64_t>{3, 4});
  recorder.reset({});
  CHECK(ticket == std::vector<std::int64_t>{3, 0});

  std::vector<Leaf> shown = plain;
  shown.push_back({{"ticket"}, DType::int64, {}});
  CHECK_THROWS_WITH_AS(Recorder(Layout(shown), {}, {}, options, {carried}),
                       doctest::Contains("ticket"), std::invalid_argument);
}

TEST_CASE("an environment's own reward and flags are copied unchanged") {
  const Layout layout({{{"x"}, DType::float32, {1}},
                       {{"next", "x"}, DType::float32, {1}},
                       {{"agents", "done"}, DType::boolean, {2}},
                       {{"next", "agents", "done"}, DType::boolean, {2}},
                       {{"agents", "truncated"}, DType::boolean, {2}},
                       {{"next", "agents", "truncated"}, DType::boolean, {2}},
                       {{"done"}, DType::boolean, {1}},
                       {{"next", "done"}, DType::boolean, {1}},
                       {{"next", "agents", "reward"}, DType::float32, {2}},
                       {{"collector", "traj_ids"}, DType::int64, {}}});
  std::vector<float> x{0};
  std::vector<std::uint8_t> done{0, 0}, truncated{0, 0}, root{0};
  Recorder recorder(
      layout,
      {{{"x"}, view_of(x, DType::float32, {1})},
       {{"agents", "done"}, view_of(done, DType::boolean, {2}), true, true, Meaning::end},
       {{"agents", "truncated"}, view_of(truncated, DType::boolean, {2})},
       {{"done"}, view_of(root, DType::boolean, {1})},
       {{"agents", "reward"}, {}, false, false, Meaning::reward}},
      {}, RecorderOptions{.set_truncated = true});
  std::vector<float> o{5}, reward{1, 2};
  std::vector<std::uint8_t> flags{0, 1};
  const std::array<ConstTensorView, 5> views{
      view_of(o, DType::float32, {1}), view_of(flags, DType::boolean, {2}),
      view_of(truncated, DType::boolean, {2}), view_of(root, DType::boolean, {1}),
      view_of(reward, DType::float32, {2})};
  recorder.restart(views);
  SlabPool pool(Placement(layout, {1, 1, 1}), 1, true);
  auto slab = pool.acquire();
  recorder.begin(slab, 0, 0);
  const std::array<ConstTensorView, 0> none{};
  CHECK(recorder.step(StepData{views, {}, {}, {}, none}) == 1);
  recorder.finish();
  const std::vector<Episode> episodes = recorder.take_episodes();
  REQUIRE(episodes.size() == 1);
  CHECK(episodes[0].total_reward == 3);
  const auto bytes = [&](const Key& key) {
    return slab->rows(static_cast<std::size_t>(layout.find(key)), 0).data;
  };
  CHECK(bytes({"agents", "done"})[0] == std::byte{0});
  CHECK(bytes({"agents", "done"})[1] == std::byte{1});
  float rewards[2];
  std::memcpy(rewards, bytes({"next", "agents", "reward"}), sizeof(rewards));
  CHECK(rewards[1] == 2);
  // set_truncated also sets the environment's own flags if these include truncation.
  CHECK(bytes({"next", "agents", "truncated"})[0] == std::byte{1});
  CHECK(bytes({"next", "agents", "done"})[0] == std::byte{1});
  CHECK(bytes({"next", "done"})[0] == std::byte{0});
}

TEST_CASE("each environment of a batch ends by any of its flags and earns the sum of its rewards") {
  const Layout layout({{{"done"}, DType::boolean, {1}},
                       {{"next", "done"}, DType::boolean, {1}},
                       {{"agents", "done"}, DType::boolean, {2}},
                       {{"next", "agents", "done"}, DType::boolean, {2}},
                       {{"next", "reward"}, DType::float32, {1}},
                       {{"next", "agents", "reward"}, DType::float64, {2}},
                       {{"collector", "traj_ids"}, DType::int64, {}}});
  std::vector<std::uint8_t> now{0, 0, 0}, of_agents{0, 0, 0, 0, 0, 0};
  Recorder recorder(
      layout,
      {{{"done"}, view_of(now, DType::boolean, {3, 1}), true, true, Meaning::end},
       {{"agents", "done"}, view_of(of_agents, DType::boolean, {3, 2}), true, true, Meaning::end},
       {{"reward"}, {}, false, false, Meaning::reward},
       {{"agents", "reward"}, {}, false, false, Meaning::reward}},
      {}, RecorderOptions{.envs = 3, .batched = true});
  std::vector<std::uint8_t> done{0, 1, 0}, agents{0, 0, 0, 0, 0, 1};
  std::vector<float> reward{1, 2, 4};
  std::vector<double> shares{8, 16, 32, 64, 128, 256};
  const std::array<ConstTensorView, 4> views{
      view_of(done, DType::boolean, {3, 1}), view_of(agents, DType::boolean, {3, 2}),
      view_of(reward, DType::float32, {3, 1}), view_of(shares, DType::float64, {3, 2})};
  recorder.restart(views);
  SlabPool pool(Placement(layout, {1, 3, 1}), 1, true);
  recorder.begin(pool.acquire(), 0, 0);
  const std::array<ConstTensorView, 0> none{};
  CHECK(recorder.step(StepData{views, {}, {}, {}, none}) == 2);
  CHECK(recorder.done()[0] == 0);
  const std::vector<Episode> episodes = recorder.take_episodes();
  REQUIRE(episodes.size() == 2);
  CHECK(episodes[0].env == 1);
  CHECK(episodes[0].total_reward == 2 + 32 + 64);
  CHECK(episodes[1].env == 2);
  CHECK(episodes[1].total_reward == 4 + 128 + 256);
}

TEST_CASE("own flags take precedence over the flags of a step") {
  const Layout layout({{{"done"}, DType::boolean, {1}},
                       {{"next", "done"}, DType::boolean, {1}},
                       {{"collector", "traj_ids"}, DType::int64, {}}});
  std::vector<std::uint8_t> now{0}, done{0};
  const ObservationSpec flag{{"done"}, view_of(now, DType::boolean, {1}), true, true, Meaning::end};
  Recorder recorder(layout, {flag}, {}, {});
  const std::array<ConstTensorView, 1> views{view_of(done, DType::boolean, {1})};
  recorder.restart(views);
  SlabPool pool(Placement(layout, {1, 1, 2}), 1, true);
  recorder.begin(pool.acquire(), 0, 0);
  CHECK(recorder.step(OneStep{views, 1, true, true, {}}) == 0);
  CHECK(recorder.step(StepData{views, {}, {}, {}, {}}) == 0);
  CHECK(recorder.take_episodes().empty());
}

TEST_CASE("own rewards without own ends are refused") {
  const Layout layout(
      {{{"next", "gain"}, DType::float32, {1}}, {{"collector", "traj_ids"}, DType::int64, {}}});
  const ObservationSpec gain{{"gain"}, {}, false, false, Meaning::reward};
  CHECK_THROWS_AS(Recorder(layout, {gain}, {}, {}), std::invalid_argument);
}
