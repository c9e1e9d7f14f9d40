#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "recording.h"

using namespace pycollect;
using namespace pycollect::tests;

TEST_CASE("rows of several workers share a slab in both memory orders") {
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

TEST_CASE("a stopped rollout ends with the current step") {
  for (bool live : {true, false}) {
    Recording r({.envs = 2, .batched = true, .set_truncated = true}, 5, all_leaves(), live);
    const RolloutControl::Number stop = std::make_shared<std::atomic<std::uint64_t>>(6);
    const RolloutControl::Number steps = std::make_shared<std::atomic<std::uint64_t>>(0);
    r.begin(4, {stop, 7, 2, steps});
    CHECK(r.step(1) == 0);
    CHECK(r.step(2) == 0);
    stop->store(7);
    CHECK(r.step(3, {0, 1}) == -2);  // one env must be reset, and the rollout ends
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

    r.begin();  // continues from the last observation
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

TEST_CASE("many environments are recorded as each alone") {
  constexpr std::int64_t kEnvs = 9, kSteps = 37;
  for (RecorderOptions options :
       {RecorderOptions{}, RecorderOptions{.max_frames_per_traj = 4},
        RecorderOptions{.skips_after_done = true}, RecorderOptions{.set_truncated = true}}) {
    options.batched = true;
    std::vector<std::unique_ptr<Recording>> alone;
    for (std::int64_t p = 0; p < kEnvs; ++p) {
      alone.push_back(std::make_unique<Recording>(options, kSteps, all_leaves()));
    }
    options.envs = kEnvs;
    Recording together(options, kSteps, all_leaves());
    float n = 0;
    for (const std::int64_t steps : {37, 20, 16}) {
      together.begin(5, {}, steps);
      for (const auto& one : alone) {
        one->begin(5, {}, steps);
      }
      for (std::int64_t t = 0; t < steps; ++t) {
        n += 1;
        std::vector<std::uint8_t> ends, cuts;
        for (std::int64_t p = 0; p < kEnvs; ++p) {
          ends.push_back((7 * t + 5 * p) % 11 == 0);
          cuts.push_back((t + p) % 6 == 0);
          Recording& one = *alone[static_cast<std::size_t>(p)];
          if (one.step(n, {ends.back()}, {cuts.back()}) > 0) {
            one.reset(1000 + n);
          }
        }
        if (together.step(n, ends, cuts) > 0) {
          together.reset(1000 + n);
        }
      }
      together.finish();
      const Layout& layout = together.slab->placement().layout();
      for (std::int64_t p = 0; p < kEnvs; ++p) {
        const Recording& one = *alone[static_cast<std::size_t>(p)];
        alone[static_cast<std::size_t>(p)]->finish();
        for (std::size_t i = 0; i < layout.size(); ++i) {
          const TensorView rows = together.slab->rows(i, 0)[p], its = one.slab->rows(i, 0)[0];
          // Compare only the first number of an observation: the second is the index of the
          // environment.
          const auto bytes = layout[i].shape == Dims{2} ? 4 : layout[i].frame_bytes();
          for (std::int64_t t = 0; t < kSteps; ++t) {
            INFO(to_string(layout[i].key), " of env ", p, " at step ", t, " of ", steps);
            CHECK(std::memcmp(rows[t].data, its[t].data, static_cast<std::size_t>(bytes)) == 0);
          }
        }
      }
    }
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
  r.recorder.abandon();
  CHECK_THROWS_AS(r.begin(0, {}, 5), std::invalid_argument);
  CHECK_THROWS_AS(r.begin(0, {}, -1), std::invalid_argument);
}

TEST_CASE("a stopped rollout has at least its minimum number of steps") {
  Recording r({}, 4, all_leaves());
  const RolloutControl::Number stop = std::make_shared<std::atomic<std::uint64_t>>(1);
  r.begin(0, {stop, 1});
  CHECK(r.step(1) == -1);
  CHECK(r.finish().frames == 1);
  r.begin(0, {stop, 1, 3});
  CHECK(r.step(2) == 0);
  CHECK(r.step(3) == 0);
  CHECK(r.step(4) == -1);
  CHECK(r.finish().frames == 3);
  r.begin(0, {stop, 1, 4});  // stopped at its regular end
  for (float n = 5; n < 9; ++n) {
    CHECK(r.step(n) == 0);
  }
  CHECK(r.finish().frames == 4);
  r.begin(0, {stop, 1});
  r.recorder.abandon();
  r.begin();
  CHECK(r.step(10) == 0);
}

TEST_CASE("leaves of other code have their place and are cleared after the end of the rollout") {
  const Key image{"image"};
  std::vector<Leaf> leaves = usual_leaves();
  leaves.push_back({image, DType::float32, {}});
  Recording r({.envs = 2, .batched = true}, 3, leaves, true, {image});
  r.begin(0, {}, 2);
  std::memset(r.slab->data(), 0xFF, static_cast<std::size_t>(r.slab->bytes()));
  r.step(1);
  r.step(2);
  r.finish();
  for (std::int64_t p = 0; p < 2; ++p) {
    CHECK(r.at<std::uint32_t>(image, 0, p) == 0xFFFFFFFF);
    CHECK(r.at<std::uint32_t>(image, 1, p) == 0xFFFFFFFF);
    CHECK(r.at<std::uint32_t>(image, 2, p) == 0);
  }
  CHECK(contains(error_of([&] { Recording({}, 3, leaves); }), "image"));
  CHECK(contains(error_of([&] { Recording({}, 3, usual_leaves(), true, {image}); }), "image"));
  // The right number of leaves, but one of them twice.
  CHECK(contains(error_of([&] { Recording({}, 3, leaves, true, {kObservation}); }), "observation"));
}

TEST_CASE("recorded arrays may be constant") {
  Recording r({.envs = 2}, 1);
  const std::array<float, 4> observed{1, 2, 3, 4};
  const std::array<double, 2> reward{5, 6};
  const std::array<bool, 2> none{};
  const std::array<std::int64_t, 2> action{7, 8};
  const std::array<float, 2> log_prob{-1, -2};
  const std::array<ConstTensorView, 1> observations{view(std::span(observed), {2, 2})};
  const std::array<ConstTensorView, 2> outputs{view(std::span(action), {2}),
                                               view(std::span(log_prob), {2, 1})};
  const ConstTensorView flags = view(std::span(none), {2});
  r.begin();
  r.recorder.step({observations, view(std::span(reward), {2}), flags, flags, outputs});
  r.finish();
  CHECK(r.number(kNextObservation, 0, 1) == 3.0F);
  CHECK(r.at<std::int64_t>({"action"}, 0, 1) == 8);
  CHECK(r.number({"next", "reward"}, 0, 0) == 5.0F);
}

TEST_CASE("environments may write into the memory that the policy reads") {
  for (bool live : {true, false}) {
    Recording r({.envs = 2}, 3, usual_leaves(), live);
    const std::array<ConstTensorView, 1> source{r.current.view()};
    const auto observe = [&](std::vector<float> values) {
      std::copy(values.begin(), values.end(), r.current.values.begin());
    };
    Array<double> reward{{2}, {1, 1}};
    Array<std::uint8_t> none{{2}, {0, 0}}, ends{{2}, {0, 1}};
    Array<std::int64_t> action{{2}, {0, 0}};
    Array<float> log_prob{{2, 1}, {0, 0}};
    const std::array<ConstTensorView, 2> outputs{action.view(), log_prob.view()};
    r.begin();
    observe({1, 2, 3, 4});
    CHECK(r.recorder.step({source, reward.view(), ends.view(), none.view(), outputs}) == 1);
    observe({1, 2, 30, 40});
    r.recorder.reset(source);
    CHECK(r.current.values == std::vector<float>{1, 2, 30, 40});
    observe({5, 6, 7, 8});
    CHECK(r.recorder.step({source, reward.view(), none.view(), none.view(), outputs}) == 0);
    observe({9, 9, 9, 9});
    CHECK(r.recorder.step({source, reward.view(), none.view(), ends.view(), outputs}) == 1);
    observe({9, 9, 60, 70});
    r.recorder.reset(source);
    r.finish();
    CHECK(r.number(kNextObservation, 0, 1) == 3.0F);  // the true successor
    CHECK(r.number(kObservation, 1, 0) == 1.0F);
    CHECK(r.number(kObservation, 1, 1) == 30.0F);
    CHECK(r.number(kNextObservation, 1, 1) == 7.0F);
    CHECK(r.number(kObservation, 2, 1) == 7.0F);
    r.begin();
    CHECK(r.number(kObservation, 0, 0) == 9.0F);
    CHECK(r.number(kObservation, 0, 1) == 60.0F);
    r.recorder.abandon();

    observe({0, 1, 2, 3});
    r.recorder.restart(source);
    r.begin();
    CHECK(r.number(kObservation, 0, 1) == 2.0F);
  }
}

TEST_CASE("several recorders write their rows of one slab at once, on separate threads") {
  constexpr std::int64_t kWorkers = 4;
  constexpr std::int64_t kSteps = 200;
  for (Order order : {Order::stack, Order::time}) {
    SlabPool pool(Placement(Layout(all_leaves()), {kWorkers, 2, kSteps, order}), 1, true);
    const auto slab = pool.acquire();
    std::vector<std::thread> threads;
    for (std::int64_t row = 0; row < kWorkers; ++row) {
      threads.emplace_back([&slab, row] {
        Recording r({.envs = 2}, 1, all_leaves());
        r.recorder.begin(slab, row, row);
        for (std::int64_t t = 1; t <= kSteps; ++t) {
          const std::uint8_t end = t % 7 == 0 ? 1 : 0;
          if (r.step(static_cast<float>(1000 * row + t), {end, 0}) > 0) {
            r.reset(static_cast<float>(-t));
          }
        }
        r.recorder.finish({.worker = row});
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    const std::span bytes(slab->data(), static_cast<std::size_t>(slab->bytes()));
    const auto leaf = static_cast<std::size_t>(slab->placement().layout().find(kNextObservation));
    for (std::int64_t row = 0; row < kWorkers; ++row) {
      const RolloutHeader header = read_header(bytes, slab->placement(), row);
      CHECK(header.worker == row);
      CHECK(header.policy_version == row);
      CHECK(header.frames == 2 * kSteps);
      const TensorView rows = slab->rows(leaf, row);
      std::int64_t wrong = 0;
      for (std::int64_t p = 0; p < 2; ++p) {
        for (std::int64_t t = 0; t < kSteps; ++t) {
          std::array<float, 2> frame;
          std::memcpy(frame.data(), rows.data + p * rows.strides[0] + t * rows.strides[1], 8);
          wrong += frame[0] != static_cast<float>(1000 * row + t + 1);
          wrong += frame[1] != static_cast<float>(p);
        }
      }
      CHECK(wrong == 0);
    }
  }
}
