#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "pycollect/multistep.h"
#include "pycollect/thread_pool.h"
#include "refused.h"

using namespace pycollect;

namespace {

using Flags = std::vector<std::uint8_t>;
using Ids = std::vector<std::int64_t>;

TensorView flags(Flags& values, const Dims& shape) {
  return TensorView::contiguous(values.data(), DType::boolean, shape);
}

TensorView ids(Ids& values, const Dims& shape) {
  return TensorView::contiguous(values.data(), DType::int64, shape);
}

TensorView doubles(std::vector<double>& values, const Dims& shape) {
  return TensorView::contiguous(values.data(), DType::float64, shape);
}

Ids steps_of(const MultiStepPlan& plan, const Dims& shape) {
  Ids steps(static_cast<std::size_t>(element_count({shape.begin(), shape.end()})), -9);
  plan.steps(ids(steps, shape));
  return steps;
}

}  // namespace

TEST_CASE("frames look n steps ahead, up to a done, the end of a row or an uncollected cell") {
  Flags done{0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0};
  Ids traj{0, 0, 0, 0, 1, 1, 2, 2, 2, -1, 3, 3};
  const SplitPlan split(flags(done, {2, 6}), ids(traj, {2, 6}), {}, 2);
  const MultiStepPlan plan(split, 3);
  CHECK(steps_of(plan, {2, 6}) == Ids{3, 3, 2, 1, 2, 1, 3, 2, 1, 0, 2, 1});

  std::vector<double> discounts(12, -9);
  plan.discounts(0.5, doubles(discounts, {2, 6}));
  CHECK(discounts == std::vector<double>{.125, .125, .25, .5, .25, .5, .125, .25, .5, 1, .25, .5});

  Flags more(12, 9);
  plan.nonterminal(flags(more, {2, 6}));
  CHECK(more == Flags{1, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0});

  ThreadPool pool(2);
  Ids numbers(12);
  for (std::size_t i = 0; i < 12; ++i) numbers[i] = static_cast<std::int64_t>(i);
  Ids moved(12);
  plan.shift(pool, std::vector<ConstTensorView>{ids(numbers, {2, 6})},
             std::vector{ids(moved, {2, 6})});
  CHECK(moved == Ids{2, 3, 3, 3, 5, 5, 8, 8, 8, 9, 11, 11});

  std::vector<double> rewards{1, 1, 1, 1, 1, 1, 1, 1, 1, 99, 1, 1};
  std::vector<double> sums(12, -9);
  plan.sum(pool, 0.5, std::vector<ConstTensorView>{doubles(rewards, {2, 6})},
           std::vector{doubles(sums, {2, 6})});
  CHECK(sums == std::vector<double>{1.75, 1.75, 1.5, 1, 1.5, 1, 1.75, 1.5, 1, 0, 1.5, 1});
}

TEST_CASE("with one step, each frame leads to itself") {
  Flags done{0, 1, 0};
  const MultiStepPlan plan(SplitPlan(flags(done, {3}), {}, {}, 1), 1);
  CHECK(steps_of(plan, {3}) == Ids{1, 1, 1});
  ThreadPool pool(1);
  std::vector<double> rewards{1, 2, 3};
  std::vector<double> sums(3);
  plan.sum(pool, 0.5, std::vector<ConstTensorView>{doubles(rewards, {3})},
           std::vector{doubles(sums, {3})});
  CHECK(sums == rewards);
  plan.discounts(0.5, doubles(sums, {3}));
  CHECK(sums == std::vector<double>{0.5, 0.5, 0.5});
}

TEST_CASE("long segments give the same result in one thread and in several, for every n") {
  constexpr std::int64_t kFrames = 300'000;
  std::mt19937_64 random(1);
  Flags done(kFrames);
  for (std::size_t t = 5'000; t < kFrames; ++t) done[t] = random() % 20'000 == 0;
  std::vector<double> rewards(kFrames);
  for (double& reward : rewards) reward = static_cast<double>(random() % 1'000);
  const SplitPlan split(flags(done, {kFrames}), {}, {}, 1);
  ThreadPool one(1);
  ThreadPool four(4);
  for (std::int64_t n : {2, 7, 1'500, 1 << 30}) {
    const MultiStepPlan plan(split, n);
    const Ids steps = steps_of(plan, {kFrames});
    std::vector<double> sums(kFrames);
    std::vector<double> shared(kFrames);
    const std::vector<ConstTensorView> source{doubles(rewards, {kFrames})};
    plan.sum(one, 1.0, source, std::vector{doubles(sums, {kFrames})});
    plan.sum(four, 1.0, source, std::vector{doubles(shared, {kFrames})});
    CHECK(sums == shared);
    // With integers and gamma 1, sums are exact and equal differences of running sums.
    std::vector<double> until(kFrames + 1);
    for (std::size_t t = 0; t < kFrames; ++t) until[t + 1] = until[t] + rewards[t];
    bool equal = true;
    for (std::size_t t = 0; t < kFrames; ++t) {
      equal = equal && sums[t] == until[t + static_cast<std::size_t>(steps[t])] - until[t];
    }
    CHECK(equal);
    std::vector<double> moved(kFrames);
    plan.shift(four, source, std::vector{doubles(moved, {kFrames})});
    for (std::size_t t = 0; t < kFrames; ++t) {
      equal = equal && moved[t] == rewards[t + static_cast<std::size_t>(steps[t]) - 1];
    }
    CHECK(equal);
  }
}

TEST_CASE("a huge or infinite value affects only the sums that include it") {
  Flags done(9);
  const MultiStepPlan plan(SplitPlan(flags(done, {9}), {}, {}, 1), 3);
  ThreadPool pool(1);
  for (double odd : {1e300, std::numeric_limits<double>::infinity()}) {
    std::vector<double> rewards{1, 1, 1, 1, odd, 1, 1, 1, 1};
    std::vector<double> sums(9);
    plan.sum(pool, 1.0, std::vector<ConstTensorView>{doubles(rewards, {9})},
             std::vector{doubles(sums, {9})});
    CHECK(sums == std::vector<double>{3, 3, odd, odd, odd, 3, 3, 2, 1});
  }
}

TEST_CASE("several lanes, types and strides") {
  Flags done{0, 0, 1, 0};
  const MultiStepPlan plan(SplitPlan(flags(done, {4}), {}, {}, 1), 2);
  ThreadPool pool(1);
  // [4, 2] in column-major order, as float, summed into double.
  std::vector<float> rewards{1, 2, 3, 4, 10, 20, 30, 40};
  TensorView source = TensorView::contiguous(rewards.data(), DType::float32, {4, 2});
  source.strides = Dims{4, 16};
  std::vector<double> sums(8);
  plan.sum(pool, 0.5, std::vector<ConstTensorView>{source}, std::vector{doubles(sums, {4, 2})});
  CHECK(sums == std::vector<double>{2, 20, 3.5, 35, 3, 30, 4, 40});
  std::vector<double> moved(8);
  plan.shift(pool, std::vector<ConstTensorView>{source}, std::vector{doubles(moved, {4, 2})});
  CHECK(moved == std::vector<double>{2, 20, 3, 30, 3, 30, 4, 40});
}

TEST_CASE("batches without cells or frames") {
  ThreadPool pool(1);
  Flags none;
  std::vector<double> nothing;
  for (const Dims& shape : {Dims{0}, Dims{3, 0}, Dims{0, 3}}) {
    const MultiStepPlan plan(SplitPlan(flags(none, shape), {}, {}, shape.size()), 3);
    plan.shift(pool, std::vector<ConstTensorView>{doubles(nothing, shape)},
               std::vector{doubles(nothing, shape)});
    plan.sum(pool, 1, std::vector<ConstTensorView>{doubles(nothing, shape)},
             std::vector{doubles(nothing, shape)});
    CHECK(steps_of(plan, shape).empty());
  }
  Ids uncollected{-1, -1};
  const MultiStepPlan plan(SplitPlan({}, ids(uncollected, {2}), {}, 1), 3);
  std::vector<double> values{1, 2};
  std::vector<double> out{7, 7};
  plan.shift(pool, std::vector<ConstTensorView>{doubles(values, {2})},
             std::vector{doubles(out, {2})});
  CHECK(out == values);
  plan.sum(pool, 1, std::vector<ConstTensorView>{doubles(values, {2})},
           std::vector{doubles(out, {2})});
  CHECK(out == std::vector<double>{0, 0});
  CHECK(steps_of(plan, {2}) == Ids{0, 0});
}

TEST_CASE("invalid arguments are refused") {
  ThreadPool pool(1);
  Flags done{0, 0, 0};
  const SplitPlan split(flags(done, {3}), {}, {}, 1);
  CHECK_REFUSED(MultiStepPlan(split, 0), "n_steps", std::invalid_argument);
  const MultiStepPlan plan(split, 2);
  std::vector<double> values(6);
  const std::vector three{doubles(values, {3})};
  const std::vector six{doubles(values, {6})};
  CHECK_THROWS_AS(plan.shift(pool, {{six[0]}}, six), std::invalid_argument);
  CHECK_THROWS_AS(plan.shift(pool, {{three[0]}}, six), std::invalid_argument);
  CHECK_THROWS_AS(plan.sum(pool, 1, {{three[0]}}, {}), std::invalid_argument);
  CHECK_THROWS_AS(plan.steps(three[0]), std::invalid_argument);
  CHECK_THROWS_AS(plan.discounts(1, six[0]), std::invalid_argument);
  CHECK_THROWS_AS(plan.nonterminal(flags(done, {1, 3})), std::invalid_argument);
}
