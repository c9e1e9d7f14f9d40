#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "pycollect/copy.h"
#include "pycollect/detail/leaf_rows.h"
#include "pycollect/slab_pool.h"
#include "refused.h"

using namespace pycollect;

namespace {

const Leaf kLeaf{{"observation"}, DType::float32, {2}};

// A slab of one worker with two environments and three steps.
struct Rows {
  SlabPool pool{Placement(Layout({kLeaf}), {1, 2, 3}), 1, true};
  std::shared_ptr<Slab> slab = pool.acquire();
  LeafRows rows{kLeaf, 0, 2, true};

  Rows() { rows.bind(*slab, 0); }
  float value(std::int64_t env, std::int64_t step, std::int64_t i) const {
    float value;
    std::memcpy(&value, rows.at(env, step) + i * 4, sizeof(value));
    return value;
  }
};

}  // namespace

TEST_CASE("a step of all envs is written to each env's row") {
  Rows r;
  std::array<float, 4> step{1, 2, 3, 4};
  const TensorView view = TensorView::contiguous(step.data(), DType::float32, {2, 2});
  CHECK(r.rows.check(view) == Fit::plain);
  r.rows.write(1, view, Fit::plain);
  CHECK(r.value(0, 1, 0) == 1);
  CHECK(r.value(1, 1, 1) == 4);
  // [P, T, 2] in memory: env 1's rows begin after the three steps of env 0.
  CHECK(r.rows.at(1, 0) - r.rows.at(0, 0) == 3 * 8);
}

TEST_CASE("another width is cast, even from strided memory, and a single env can be written") {
  Rows r;
  std::array<double, 8> wide{1, -1, 2, -1, 3, -1, 4, -1};
  TensorView every_other = TensorView::contiguous(wide.data(), DType::float64, {2, 2});
  every_other.strides = {32, 16};
  CHECK(r.rows.check(every_other) == Fit::converted);
  r.rows.write(0, every_other, Fit::converted);
  CHECK(r.value(0, 0, 1) == 2);
  CHECK(r.value(1, 0, 0) == 3);
  r.rows.write_env(1, 2, every_other, Fit::converted);
  CHECK(r.value(1, 2, 1) == 4);
}

TEST_CASE("numbers of the leaf's type are put at one step or at all steps") {
  const Leaf leaf{{"count"}, DType::int64, {1}};
  SlabPool pool(Placement(Layout({leaf}), {1, 2, 3}), 1, true);
  const std::shared_ptr<Slab> slab = pool.acquire();
  LeafRows rows(leaf, 0, 2, true);
  rows.bind(*slab, 0);
  rows.put_first(3, std::int64_t{7});
  rows.put_all(1, std::vector<std::int64_t>{10, 20});
  rows.put(1, 2, std::int64_t{30});
  std::array<std::int64_t, 6> all;
  std::memcpy(all.data(), rows.at(0, 0), sizeof(all));
  CHECK(all == std::array<std::int64_t, 6>{7, 10, 7, 7, 20, 30});
}

TEST_CASE("small frames of many envs are written to their rows together, and can be read before") {
  constexpr std::int64_t kEnvs = 11, kSteps = 40;
  const Leaf leaf{{"count"}, DType::int64, {}};
  SlabPool pool(Placement(Layout({leaf}), {1, kEnvs, kSteps}), 1, true);
  const std::shared_ptr<Slab> slab = pool.acquire();
  LeafRows rows(leaf, 0, kEnvs, true);
  rows.bind(*slab, 0);
  const auto value = [&](std::int64_t env, std::int64_t step) {
    std::int64_t number;
    std::memcpy(&number, rows.at(env, step), sizeof(number));
    return number;
  };
  std::vector<std::int64_t> step(kEnvs);
  std::vector<std::int16_t> narrow(kEnvs);
  const auto changed = static_cast<std::int64_t>(kEnvs - 1);
  for (std::int64_t t = 0; t < kSteps; ++t) {
    for (std::size_t p = 0; p < kEnvs; ++p) {
      step[p] = 100 * t + static_cast<std::int64_t>(p);
      narrow[p] = static_cast<std::int16_t>(step[p]);
    }
    const TensorView cast = TensorView::contiguous(narrow.data(), DType::int16, {kEnvs});
    if (t % 2 == 0) {
      rows.put_all(t, step);
    } else {
      rows.write(t, cast, rows.check(cast));
    }
    rows.put(0, t, std::int64_t{-1} - t);
    rows.fill(1, t, 1, 0xFF);
    narrow.back() = 7;
    rows.write_env(changed, t, cast, Fit::converted);
    for (std::int64_t back = 0; back <= t; ++back) {
      CHECK(value(0, back) == -1 - back);
      CHECK(value(1, back) == -1);
      CHECK(value(2, back) == 100 * back + 2);
      CHECK(value(changed, back) == 7);
    }
  }
  rows.flush();
  for (std::int64_t t = 0; t < kSteps; ++t) {
    std::int64_t stored;
    std::memcpy(&stored, slab->rows(0, 0)[5][t].data, sizeof(stored));
    CHECK(stored == 100 * t + 5);
  }
}

TEST_CASE("small frames are written correctly for all sizes, envs and steps") {
  for (const std::int64_t bytes : {1, 3, 4, 8, 12, 16, 32}) {
    for (const std::int64_t envs : {8, 9, 11, 18}) {
      for (const std::int64_t steps : {64, 67}) {
        const Leaf leaf{{"frame"}, DType::uint8, {bytes}};
        SlabPool pool(Placement(Layout({leaf}), {1, envs, steps}), 1, true);
        const std::shared_ptr<Slab> slab = pool.acquire();
        LeafRows rows(leaf, 0, envs, true);
        rows.bind(*slab, 0);
        const auto value = [&](std::int64_t env, std::int64_t step, std::int64_t i) {
          return static_cast<std::uint8_t>(7 * env + 31 * step + 3 * i);
        };
        std::vector<std::uint8_t> frames(static_cast<std::size_t>(envs * bytes));
        for (std::int64_t t = 0; t < steps; ++t) {
          for (std::int64_t at = 0; at < envs * bytes; ++at) {
            frames[static_cast<std::size_t>(at)] = value(at / bytes, t, at % bytes);
          }
          rows.put_all(t, frames);
        }
        rows.flush();
        std::int64_t wrong = 0;
        for (std::int64_t p = 0; p < envs; ++p) {
          for (std::int64_t t = 0; t < steps; ++t) {
            const std::byte* const stored = slab->rows(0, 0)[p][t].data;
            for (std::int64_t i = 0; i < bytes; ++i) {
              wrong += static_cast<std::int64_t>(stored[i] != std::byte{value(p, t, i)});
            }
          }
        }
        INFO(bytes, " bytes, ", envs, " envs, ", steps, " steps");
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE("invalid arrays are refused by the leaf's name") {
  Rows r;
  std::array<float, 4> step{};
  const auto three = TensorView::contiguous(step.data(), DType::float32, {2, 1});
  CHECK_REFUSED(r.rows.check(three), "observation", std::invalid_argument);
  const auto complex = TensorView::contiguous(step.data(), DType::complex64, {2, 1});
  CHECK_THROWS_AS(r.rows.check(complex), std::invalid_argument);
  std::array<double, 4> wide{};
  const auto exact = TensorView::contiguous(wide.data(), DType::float64, {2, 2});
  CHECK(r.rows.check(exact) == Fit::converted);
  CHECK_THROWS_AS(r.rows.check(exact, true), std::invalid_argument);
  CHECK_THROWS_AS(r.rows.bind(exact), std::invalid_argument);
}

TEST_CASE("large frames are written whole from any address") {
  // A multiple of 64 bytes, a different size, and a small slab, which is written through the
  // caches.
  for (const auto& [extent, steps, streams] :
       {std::tuple{4160, 2100, true}, {4161, 2100, true}, {4160, 3, false}}) {
    const Leaf leaf{{"pixels"}, DType::uint8, {extent}};
    SlabPool pool(Placement(Layout({leaf}), {1, 2, steps}), 1, false);
    const std::shared_ptr<Slab> slab = pool.acquire();
    CHECK(slab->streams() == streams);
    LeafRows rows(leaf, 0, 2, true);
    rows.bind(*slab, 0);
    std::vector<std::uint8_t> frames(static_cast<std::size_t>(2 * extent + 1));
    for (std::size_t i = 0; i < frames.size(); ++i) {
      frames[i] = static_cast<std::uint8_t>(i * 7 + i / 256);
    }
    std::uint8_t* unaligned = frames.data() + 1;
    rows.write(2, TensorView::contiguous(unaligned, DType::uint8, {2, extent}), Fit::plain);
    stream_fence();
    for (std::int64_t env = 0; env < 2; ++env) {
      CHECK(std::memcmp(rows.at(env, 2), unaligned + env * extent,
                        static_cast<std::size_t>(extent)) == 0);
    }
  }
}
