#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

#include "pycollect/copy.h"
#include "pycollect/split.h"
#include "pycollect/thread_pool.h"
#include "refused.h"

using namespace pycollect;

namespace {

using Flags = std::vector<std::uint8_t>;
using Ids = std::vector<std::int64_t>;

TensorView flags(Flags& values, const Dims& shape) {
  return TensorView::contiguous(values.data(), DType::boolean, shape);
}

TensorView numbers(Ids& values, const Dims& shape) {
  return TensorView::contiguous(values.data(), DType::int64, shape);
}

std::vector<Ids> segments_of(const SplitPlan& plan) {
  std::vector<Ids> segments;
  for (const Segment& segment : plan.segments()) {
    segments.push_back({segment.row, segment.start, segment.length});
  }
  return segments;
}

Ids offsets_of(const SplitPlan& plan) { return {plan.offsets().begin(), plan.offsets().end()}; }

}  // namespace

TEST_CASE("a row is cut after each done and at its end") {
  Flags done{0, 1, 0, 0, 0, 1, 0, 1};
  const SplitPlan plan(flags(done, {2, 4, 1}), {}, {}, 2);
  CHECK(segments_of(plan) == std::vector<Ids>{{0, 0, 2}, {0, 2, 2}, {1, 0, 2}, {1, 2, 2}});
  CHECK(offsets_of(plan) == Ids{0, 2, 4, 6, 8});
  CHECK(plan.lengths() == Ids{2, 2, 2, 2});
  CHECK(plan.count() == 4);
  CHECK(plan.longest() == 2);
  CHECK(plan.frames() == 8);
}

TEST_CASE("a constant batch is cut and gathered") {
  const std::array<std::uint8_t, 4> done{0, 1, 0, 0};
  const std::array<float, 4> values{1, 2, 3, 4};
  const SplitPlan plan(ConstTensorView::contiguous(done.data(), DType::boolean, {1, 4}), {}, {}, 2);
  std::array<float, 4> flat{};
  ThreadPool pool(1);
  plan.flat(pool, {{view(std::span(values), {1, 4})}}, {{view(std::span(flat), {4})}});
  CHECK(flat == values);
}

TEST_CASE("a row is cut where the id changes, and repeated ids do not merge") {
  Ids ids{5, 5, 3, 5, 5, 5};
  const SplitPlan plan({}, numbers(ids, {2, 3}), {}, 2);
  CHECK(segments_of(plan) == std::vector<Ids>{{0, 0, 2}, {0, 2, 1}, {1, 0, 3}});
  // The same id before and after a done.
  Flags done{0, 1, 0, 0, 0, 0};
  Ids same(6, 9);
  CHECK(segments_of(SplitPlan(flags(done, {6}), numbers(same, {6}), {}, 1)) ==
        std::vector<Ids>{{0, 0, 2}, {0, 2, 4}});
}

TEST_CASE("uncollected cells are dropped and join no trajectories") {
  Flags done{0, 1, 0, 0, 0, 0};
  Ids ids{0, 0, -1, 1, -1, 1};
  const std::vector<Ids> expected{{0, 0, 2}, {0, 3, 1}, {0, 5, 1}};
  CHECK(segments_of(SplitPlan(flags(done, {6}), numbers(ids, {6}), {}, 1)) == expected);
  Ids all{0, 0, 7, 1, 7, 1};
  Flags mask{1, 1, 0, 1, 0, 1};
  CHECK(segments_of(SplitPlan(flags(done, {6}), numbers(all, {6}), flags(mask, {6}), 1)) ==
        expected);
  CHECK(segments_of(SplitPlan(flags(done, {6}), {}, flags(mask, {6}), 1)) == expected);
  // A done in an uncollected cell is ignored.
  Flags late{0, 0, 1, 0, 0, 0};
  Ids one{0, 0, -1, 0, 0, 0};
  CHECK(segments_of(SplitPlan(flags(late, {6}), numbers(one, {6}), {}, 1)) ==
        std::vector<Ids>{{0, 0, 2}, {0, 3, 3}});
  Ids none(6, -1);
  const SplitPlan empty(flags(done, {6}), numbers(none, {6}), {}, 1);
  CHECK(empty.count() == 0);
  CHECK(empty.longest() == 0);
  CHECK(offsets_of(empty) == Ids{0});
}

TEST_CASE("batches without cells") {
  Flags done;
  for (const Dims& shape : {Dims{0}, Dims{3, 0}, Dims{0, 3}, Dims{2, 0, 3}}) {
    const SplitPlan plan(flags(done, shape), {}, {}, shape.size());
    CHECK(plan.count() == 0);
    CHECK(plan.frames() == 0);
  }
}

TEST_CASE("strided signals and sources, three batch dimensions") {
  // [2, 2, 3] as a view of [3, 2, 2] with the dimensions reversed.
  std::mt19937 random(3);
  Flags memory(12);
  std::vector<std::int32_t> values(12 * 2);
  for (std::size_t i = 0; i < 12; ++i) {
    memory[i] = random() % 3 == 0;
    values[2 * i] = static_cast<std::int32_t>(i);
    values[2 * i + 1] = -static_cast<std::int32_t>(i);
  }
  TensorView done = flags(memory, {2, 2, 3});
  done.strides = {1, 2, 4};
  TensorView source = TensorView::contiguous(values.data(), DType::int32, {2, 2, 3, 2});
  source.strides = {8, 16, 32, 4};
  const SplitPlan plan(done, {}, {}, 3);
  ThreadPool pool(2);
  std::vector<std::int32_t> flat(static_cast<std::size_t>(plan.frames()) * 2);
  std::vector<double> padded(static_cast<std::size_t>(plan.count() * plan.longest()) * 2, -1);
  const TensorView flat_view =
      TensorView::contiguous(flat.data(), DType::int32, {plan.frames(), 2});
  const TensorView padded_view =
      TensorView::contiguous(padded.data(), DType::float64, {plan.count(), plan.longest(), 2});
  plan.flat(pool, {{source}}, {{flat_view}});
  plan.padded(pool, {{source}}, {{padded_view}});  // with a cast
  std::size_t frame = 0;
  std::size_t i = 0;
  for (const Segment& segment : plan.segments()) {
    for (std::int64_t t = 0; t < plan.longest(); ++t) {
      const double* cell =
          &padded[(i * static_cast<std::size_t>(plan.longest()) + static_cast<std::size_t>(t)) * 2];
      if (t >= segment.length) {
        CHECK(cell[0] == 0);
        CHECK(cell[1] == 0);
        continue;
      }
      const std::int64_t index =
          (segment.row / 2) + (segment.row % 2) * 2 + (segment.start + t) * 4;
      CHECK(cell[0] == index);
      CHECK(cell[1] == -index);
      CHECK(flat[2 * frame] == index);
      CHECK(flat[2 * frame + 1] == -index);
      ++frame;
    }
    ++i;
  }
  CHECK(frame == 12);
}

TEST_CASE("large gathers use several threads and give the same result") {
  std::mt19937 random(5);
  constexpr std::int64_t kRows = 16, kSteps = 2000;
  Flags done(kRows * kSteps);
  for (auto& flag : done) {
    flag = random() % 40 == 0;
  }
  std::vector<float> wide(kRows * kSteps * 7);
  std::vector<std::uint8_t> narrow(kRows * kSteps);
  std::vector<std::uint8_t> nothing;
  for (std::size_t i = 0; i < wide.size(); ++i) {
    wide[i] = static_cast<float>(i);
    narrow[i % narrow.size()] = static_cast<std::uint8_t>(random());
  }
  const std::vector<ConstTensorView> sources{
      TensorView::contiguous(wide.data(), DType::float32, {kRows, kSteps, 7}),
      TensorView::contiguous(nothing.data(), DType::uint8, {kRows, kSteps, 0}),
      TensorView::contiguous(narrow.data(), DType::uint8, {kRows, kSteps})};
  const SplitPlan plan(flags(done, {kRows, kSteps}), {}, {}, 2);
  const std::int64_t N = plan.count(), L = plan.longest(), F = plan.frames();
  CHECK(F == kRows * kSteps);
  std::vector<std::vector<std::byte>> results;
  for (int threads : {1, 4}) {
    ThreadPool pool(threads);
    std::vector<float> wide_padded(static_cast<std::size_t>(N * L * 7), -1);
    std::vector<std::uint8_t> narrow_padded(static_cast<std::size_t>(N * L), 9);
    plan.padded(pool, sources,
                std::vector<TensorView>{
                    TensorView::contiguous(wide_padded.data(), DType::float32, {N, L, 7}),
                    TensorView::contiguous(nothing.data(), DType::uint8, {N, L, 0}),
                    TensorView::contiguous(narrow_padded.data(), DType::uint8, {N, L})});
    std::vector<float> wide_flat(static_cast<std::size_t>(F * 7));
    std::vector<std::uint8_t> narrow_flat(static_cast<std::size_t>(F));
    plan.flat(
        pool, sources,
        std::vector<TensorView>{TensorView::contiguous(wide_flat.data(), DType::float32, {F, 7}),
                                TensorView::contiguous(nothing.data(), DType::uint8, {F, 0}),
                                TensorView::contiguous(narrow_flat.data(), DType::uint8, {F})});
    CHECK(wide_flat == wide);  // nothing was dropped, so the order is that of the batch
    CHECK(narrow_flat == narrow);
    for (std::int64_t i = 0; i < N; ++i) {
      const Segment& segment = plan.segments()[static_cast<std::size_t>(i)];
      const auto from = static_cast<std::size_t>(segment.row * kSteps + segment.start);
      for (std::int64_t t = 0; t < L; ++t) {
        const auto cell = static_cast<std::size_t>(i * L + t);
        const bool there = t < segment.length;
        const auto frame = from + static_cast<std::size_t>(t);
        REQUIRE(narrow_padded[cell] == (there ? narrow[frame] : 0));
        REQUIRE(wide_padded[cell * 7 + 6] == (there ? wide[frame * 7 + 6] : 0.0f));
      }
    }
  }
}

TEST_CASE("the mask, and padding with another value, into strided targets") {
  Flags done{0, 1, 0, 0, 0};
  const SplitPlan plan(flags(done, {5}), {}, {}, 1);
  REQUIRE(plan.longest() == 3);
  Flags mask(2 * 3 * 2, 7);
  TensorView target = flags(mask, {2, 6});
  target.shape[1] = 3;
  target.strides[1] = 2;
  plan.mask(target);
  CHECK(mask == Flags{1, 7, 1, 7, 0, 7, 1, 7, 1, 7, 1, 7});
  std::vector<std::int16_t> ids{1, 1, 0, 2, 2, 2};
  plan.pad(TensorView::contiguous(ids.data(), DType::int16, {2, 3, 1}), -1);
  CHECK(ids == std::vector<std::int16_t>{1, 1, -1, 2, 2, 2});
  plan.pad(TensorView::contiguous(nullptr, DType::int16, {2, 3, 0}), -1);  // no address either
}

TEST_CASE("invalid arguments are refused") {
  Flags done(6);
  Ids ids(6);
  ThreadPool pool(1);
  CHECK_REFUSED(SplitPlan({}, {}, {}, 1), "split", std::invalid_argument);
  CHECK_THROWS_AS(SplitPlan(flags(done, {6}), {}, {}, 0), std::invalid_argument);
  CHECK_THROWS_AS(SplitPlan(flags(done, {6}), {}, {}, 2), std::invalid_argument);
  CHECK_REFUSED(SplitPlan(flags(done, {3, 2}), {}, {}, 1), "done", std::invalid_argument);
  CHECK_THROWS_AS(SplitPlan(numbers(ids, {6}), {}, {}, 1), std::invalid_argument);
  CHECK_THROWS_AS(SplitPlan(flags(done, {6}), numbers(ids, {3, 2}), {}, 1), std::invalid_argument);
  CHECK_THROWS_AS(SplitPlan(flags(done, {6}), {}, numbers(ids, {6}), 1), std::invalid_argument);

  const SplitPlan plan(flags(done, {6}), {}, {}, 1);
  std::vector<float> values(6);
  const TensorView source = TensorView::contiguous(values.data(), DType::float32, {6});
  const TensorView flat = source;
  CHECK_REFUSED(plan.flat(pool, {{source}}, {}), "targets", std::invalid_argument);
  CHECK_REFUSED(plan.padded(pool, {{source}}, {{flat}}), "target 0", std::invalid_argument);
  const TensorView short_source = TensorView::contiguous(values.data(), DType::float32, {5});
  CHECK_REFUSED(plan.flat(pool, {{short_source}}, {{flat}}), "source 0", std::invalid_argument);
  CHECK_THROWS_AS(plan.mask(flags(done, {6})), std::invalid_argument);
  CHECK_THROWS_AS(plan.pad(flags(done, {6}), 0), std::invalid_argument);
}
