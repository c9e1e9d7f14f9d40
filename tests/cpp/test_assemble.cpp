#include <doctest/doctest.h>

#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "pycollect/assemble.h"
#include "pycollect/copy.h"
#include "pycollect/thread_pool.h"
#include "refused.h"

using namespace pycollect;

namespace {

Layout sample() {
  return Layout({{{"observation"}, DType::float32, {3}},
                 {{"flag"}, DType::boolean, {1}},
                 {{"nothing"}, DType::uint8, {0}},
                 {{"collector", "traj_ids"}, DType::int64, {}},
                 {{"collector", "mask"}, DType::boolean, {}}});
}

using Bytes = std::vector<std::byte>;

// A rollout in which every byte depends on its position and the worker. Flags are 0 or 1.
Bytes rollout_of(const Placement& placement, std::int64_t worker) {
  Bytes bytes(static_cast<std::size_t>(placement.bytes()), std::byte{1});
  TensorView observation = placement.rows(bytes.data(), 0, 0);
  for (std::int64_t i = 0; i < observation.count(); ++i) {
    const auto value = static_cast<float>(1000 * worker + i);
    std::memcpy(observation.data + i * 4, &value, 4);
  }
  TensorView ids = placement.rows(bytes.data(), 3, 0);
  for (std::int64_t i = 0; i < ids.count(); ++i) {
    const std::int64_t id = worker;
    std::memcpy(ids.data + i * 8, &id, 8);
  }
  RolloutHeader header;
  header.worker = worker;
  header.frames = placement.geometry().frames();
  const std::vector<std::int64_t> lengths(static_cast<std::size_t>(placement.geometry().envs),
                                          placement.geometry().steps);
  write_header(bytes.data(), placement, 0, header, lengths);
  return bytes;
}

template <typename T>
T at(const TensorView& view, std::int64_t b, std::int64_t p, std::int64_t t) {
  T value;
  std::memcpy(&value, view.data + b * view.strides[0] + p * view.strides[1] + t * view.strides[2],
              sizeof(T));
  return value;
}

Bytes poisoned(const Placement& placement) {
  return Bytes(static_cast<std::size_t>(placement.bytes()), std::byte{0xA5});
}

std::vector<std::int64_t> renumbered(TrajectoryIds& ids, std::int64_t worker,
                                     std::vector<std::int64_t> values, std::int64_t envs,
                                     TrajectoryIds::Known known = TrajectoryIds::Known::nothing) {
  const auto steps = static_cast<std::int64_t>(values.size()) / envs;
  ids.renumber(worker, TensorView::contiguous(values.data(), DType::int64, {envs, steps}), known);
  return values;
}

using Values = std::vector<std::int64_t>;

}  // namespace

TEST_CASE("rollouts become rows in both orders, from unaligned memory, padded if short") {
  ThreadPool pool(2);
  constexpr std::int64_t kWorkers = 3, kEnvs = 2, kSteps = 5;
  for (Order order : {Order::stack, Order::time}) {
    for (std::int64_t steps : {kSteps, std::int64_t{3}}) {
      const Placement batch(sample(), {kWorkers, kEnvs, kSteps, order});
      const Placement placement(sample(), {1, kEnvs, steps, Order::stack});
      Bytes slab = poisoned(batch);
      for (std::int64_t worker = 0; worker < kWorkers; ++worker) {
        const Bytes rollout = rollout_of(placement, worker);
        Bytes shifted(rollout.size() + 1);
        std::memcpy(shifted.data() + 1, rollout.data(), rollout.size());
        const RolloutHeader header = place_rollout(pool, slab.data(), batch, worker,
                                                   std::span(shifted).subspan(1), placement);
        CHECK(header.worker == worker);
        CHECK(header.frames == kEnvs * steps);
        CHECK(read_header(slab, batch, worker).steps == kSteps);
      }
      const TensorView observation = batch.view(slab.data(), 0);
      const TensorView flag = batch.view(slab.data(), 1);
      const TensorView ids = batch.view(slab.data(), 3);
      const TensorView mask = batch.view(slab.data(), 4);
      for (std::int64_t b = 0; b < kWorkers; ++b) {
        for (std::int64_t p = 0; p < kEnvs; ++p) {
          for (std::int64_t t = 0; t < kSteps; ++t) {
            const bool there = t < steps;
            const float expected = static_cast<float>(1000 * b + 3 * (p * steps + t));
            CHECK(at<float>(observation, b, p, t) == (there ? expected : 0.0f));
            CHECK(at<std::uint8_t>(flag, b, p, t) == (there ? 1 : 0));
            CHECK(at<std::int64_t>(ids, b, p, t) == (there ? b : -1));
            CHECK(at<std::uint8_t>(mask, b, p, t) == (there ? 1 : 0));
          }
        }
      }
    }
  }
}

TEST_CASE("a whole batch becomes a row of another, with workers as envs or along time") {
  ThreadPool pool(2);
  constexpr std::int64_t kWorkers = 3, kEnvs = 2, kSteps = 5, kRow = 1;
  for (Order inner : {Order::stack, Order::time}) {
    const bool as_envs = inner == Order::stack;
    const Placement from(sample(), {kWorkers, kEnvs, kSteps, inner});
    const Placement rollout(sample(), {1, kEnvs, kSteps, Order::stack});
    Bytes slab = poisoned(from);
    for (std::int64_t worker = 0; worker < kWorkers; ++worker) {
      place_rollout(pool, slab.data(), from, worker, rollout_of(rollout, worker), rollout);
      RolloutHeader header;
      header.policy_version = 9 - worker;
      header.frames = kEnvs * (kSteps - worker);
      write_header(slab.data(), from, worker, header, Values(kEnvs, kSteps - worker));
    }
    for (Order outer : {Order::stack, Order::time}) {
      const std::int64_t envs = as_envs ? kWorkers * kEnvs : kEnvs;
      const std::int64_t steps = as_envs ? kSteps : kWorkers * kSteps;
      const Placement batch(sample(), {2, envs, steps, outer});
      Bytes target = poisoned(batch);
      RolloutHeader given;
      given.worker = 7;
      given.incarnation = 2;
      given.sequence = 4;
      given.generation = 11;
      join_rollouts(pool, target.data(), batch, kRow, slab, from, given);
      const RolloutHeader header = read_header(target, batch, kRow);
      CHECK(std::tuple(header.worker, header.incarnation, header.sequence) == std::tuple(7, 2, 4));
      CHECK(header.generation == 11);
      CHECK(header.policy_version == 9 - (kWorkers - 1));
      CHECK(header.frames == kEnvs * (5 + 4 + 3));
      const Values lengths = read_lengths(target, batch, kRow);
      CHECK(lengths == (as_envs ? Values{5, 5, 4, 4, 3, 3} : Values{12, 12}));
      const TensorView there = batch.view(target.data(), 0);
      const TensorView here = from.view(slab.data(), 0);
      for (std::int64_t w = 0; w < kWorkers; ++w) {
        for (std::int64_t p = 0; p < kEnvs; ++p) {
          for (std::int64_t t = 0; t < kSteps; ++t) {
            const float value = as_envs ? at<float>(there, kRow, w * kEnvs + p, t)
                                        : at<float>(there, kRow, p, w * kSteps + t);
            CHECK(value == at<float>(here, w, p, t));
          }
        }
      }
    }
    const Placement wrong(sample(), {2, kWorkers * kEnvs, kSteps + 1, Order::stack});
    Bytes untouched = poisoned(wrong);
    const auto join = [&](const Placement& batch, std::int64_t row) {
      join_rollouts(pool, untouched.data(), batch, row, slab, from, {});
    };
    CHECK_THROWS_AS(join(wrong, 0), std::invalid_argument);
    CHECK_THROWS_AS(join(Placement(sample(), {2, as_envs ? kEnvs : kWorkers * kEnvs,
                                              as_envs ? kWorkers * kSteps : kSteps, inner}),
                         0),
                    std::invalid_argument);
    CHECK_THROWS_AS(join(wrong, 2), std::out_of_range);
    CHECK(untouched == poisoned(wrong));
  }
}

TEST_CASE("a rollout that does not fit changes nothing") {
  ThreadPool pool(1);
  const Placement batch(sample(), {2, 2, 5, Order::stack});
  const Placement placement(sample(), {1, 2, 5, Order::stack});
  Bytes slab = poisoned(batch);
  const Bytes before = slab;
  const Bytes good = rollout_of(placement, 0);
  const auto place = [&](const Bytes& bytes, const Placement& from, std::int64_t row = 0) {
    place_rollout(pool, slab.data(), batch, row, bytes, from);
  };
  SUBCASE("an unknown row") {
    CHECK_REFUSED(place(good, placement, 2), "row", std::out_of_range);
    CHECK_THROWS_AS(place(good, placement, -1), std::out_of_range);
  }
  SUBCASE("bytes that are not a rollout") {
    CHECK_THROWS_AS(place(Bytes(good.size()), placement), std::invalid_argument);
    CHECK_THROWS_AS(place(Bytes(3), placement), std::invalid_argument);
    CHECK_THROWS_AS(place({}, placement), std::invalid_argument);
    Bytes broken = good;
    broken[sizeof(RolloutHeader)] ^= std::byte{1};  // a length
    CHECK_THROWS_AS(place(broken, placement), std::invalid_argument);
  }
  SUBCASE("a length past the end with a valid checksum") {
    Bytes invalid = good;
    write_header(invalid.data(), placement, 0, {}, Values{5, 6});
    CHECK_REFUSED(place(invalid, placement), "rollout header", std::invalid_argument);
  }
  SUBCASE("another geometry or layout") {
    const Placement longer(sample(), {1, 2, 6, Order::stack});
    CHECK_THROWS_AS(place(rollout_of(longer, 0), longer), std::invalid_argument);
    const Placement wider(sample(), {1, 3, 5, Order::stack});
    CHECK_THROWS_AS(place(rollout_of(wider, 0), wider), std::invalid_argument);
    const Placement other(Layout({{{"observation"}, DType::float32, {3}}}),
                          {1, 2, 5, Order::stack});
    CHECK_THROWS_AS(place(Bytes(static_cast<std::size_t>(other.bytes())), other),
                    std::invalid_argument);
  }
  CHECK(slab == before);
}

TEST_CASE("ids are numbered by env, then time, and continue in the next rollout") {
  TrajectoryIds ids;
  CHECK(renumbered(ids, 0, {0, 0, 1, 1, 0, 1, 2, 2}, 2) == Values{0, 0, 1, 1, 2, 3, 4, 4});
  CHECK(renumbered(ids, 1, {0, 0}, 1) == Values{5, 5});
  CHECK(renumbered(ids, 0, {1, 2, 2, 2, 2, 2, 2, 7}, 2) == Values{1, 6, 6, 6, 4, 4, 4, 7});
  CHECK(ids.next() == 8);
}

TEST_CASE("uncollected cells stay -1 and end no trajectory") {
  TrajectoryIds ids;
  CHECK(renumbered(ids, 0, {-1, -1}, 1) == Values{-1, -1});
  CHECK(renumbered(ids, 0, {0, -1, 0, -1, 1}, 1) == Values{0, -1, 0, -1, 1});
  CHECK(renumbered(ids, 0, {-1, 1}, 1) == Values{-1, 1});
}

TEST_CASE("a replaced worker starts new trajectories") {
  TrajectoryIds ids;
  renumbered(ids, 0, {3, 3}, 1);
  ids.forget(0);
  ids.forget(5);  // never seen
  CHECK(renumbered(ids, 0, {0, 3}, 1) == Values{1, 2});
}

TEST_CASE("a rollout without steps has no ids, and no address") {
  TrajectoryIds ids;
  ids.renumber(0, TensorView::contiguous(nullptr, DType::int64, {3, 0}));
  CHECK(ids.next() == 0);
}

TEST_CASE("invalid ids are refused and change nothing") {
  TrajectoryIds ids;
  renumbered(ids, 0, {4, 4, 4, 4}, 2);
  const TrajectoryIds::State before = ids.state();
  Values values{4, 5, 5, 3};
  const auto view = [&](const Dims& shape) {
    return TensorView::contiguous(values.data(), DType::int64, shape);
  };
  CHECK_REFUSED(ids.renumber(0, view({2, 2})), "ids", std::invalid_argument);
  CHECK(values == Values{4, 5, 5, 3});
  CHECK_THROWS_AS(ids.renumber(0, view({4, 1})), std::invalid_argument);
  CHECK_THROWS_AS(ids.renumber(0, view({4})), std::invalid_argument);
  values = {-2, 0, 0, 0};
  CHECK_THROWS_AS(ids.renumber(1, view({2, 2})), std::invalid_argument);
  CHECK_THROWS_AS(ids.renumber(1, TensorView::contiguous(values.data(), DType::int32, {2, 2})),
                  std::invalid_argument);
  constexpr std::int64_t kMost = (std::int64_t{1} << 62) - 1;
  values = {std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min(), 0,
            0};  // the difference is 1 if it wraps
  CHECK_REFUSED(ids.renumber(1, view({1, 2})), "ids", std::invalid_argument);
  values = {kMost - 1, kMost, kMost + 1, std::numeric_limits<std::int64_t>::max()};
  for (std::ptrdiff_t first : {1, 2, 3}) {  // sums of larger ids would not fit in 64 bits
    CHECK_REFUSED(ids.renumber(1, TensorView::contiguous(values.data() + first, DType::int64,
                                                         {1, 4 - first})),
                  "ids", std::invalid_argument);
  }
  CHECK_REFUSED(ids.issue(kMost), "count", std::invalid_argument);
  CHECK(ids.state() == before);
  ids.renumber(1, view({1, 2}));
  CHECK(values[1] == ids.next() - 1);
  TrajectoryIds late({kMost, {}});
  values = {kMost - 1, kMost, -1, -1};
  late.renumber(0, view({1, 4}));
  CHECK(values == Values{kMost, kMost + 1, -1, -1});
}

TEST_CASE("a state is restored and checked") {
  TrajectoryIds ids;
  renumbered(ids, 3, {0, 1, 0, 0}, 2);
  TrajectoryIds copy(ids.state());
  CHECK(renumbered(copy, 3, {1, 2, 0, 1}, 2) == renumbered(ids, 3, {1, 2, 0, 1}, 2));
  CHECK(copy.state() == ids.state());
  CHECK_THROWS_AS(TrajectoryIds({-1, {}}), std::invalid_argument);
  CHECK_THROWS_AS(TrajectoryIds({std::int64_t{1} << 62, {}}), std::invalid_argument);
  CHECK_THROWS_AS(TrajectoryIds({1, {{0, {{0}, {1}}}}}), std::invalid_argument);
  CHECK_THROWS_AS(TrajectoryIds({1, {{0, {{0, 1}, {0}}}}}), std::invalid_argument);
  CHECK_THROWS_AS(TrajectoryIds({1, {{0, {{-1}, {0}}}}}), std::invalid_argument);
}

TEST_CASE("renumbering gives the same result whether or not ids are known to count") {
  std::mt19937 random(11);
  for (const std::int64_t envs : {1, 3}) {
    TrajectoryIds told, untold;
    Values open(static_cast<std::size_t>(envs), 0);
    for (int round = 0; round < 100; ++round) {
      Values local;
      for (std::int64_t& id : open) {
        id += static_cast<std::int64_t>(random() % 4);  // ids may skip between rollouts
        for (int t = 0; t < 9; ++t) {
          id += static_cast<std::int64_t>(t > 0 && random() % 3 == 0);
          local.push_back(id);
        }
      }
      CHECK(renumbered(told, 0, local, envs, TrajectoryIds::Known::counting) ==
            renumbered(untold, 0, local, envs));
      CHECK(told.state() == untold.state());
    }
  }
  TrajectoryIds ids;
  CHECK_THROWS_AS(renumbered(ids, 0, {-2, -1}, 1, TrajectoryIds::Known::counting),
                  std::invalid_argument);
  CHECK(ids.state() == TrajectoryIds::State{});
}

TEST_CASE("ids of random rollouts are unique, without gaps, and stable") {
  std::mt19937 random(7);
  TrajectoryIds ids;
  std::map<std::tuple<std::int64_t, int, std::int64_t, std::int64_t>, std::int64_t> known;
  std::map<std::int64_t, std::int64_t> incarnations;
  std::map<std::int64_t, Values> current;
  std::int64_t highest = -1;
  for (int round = 0; round < 300; ++round) {
    const auto worker = static_cast<std::int64_t>(random() % 3);
    if (random() % 20 == 0) {
      ids.forget(worker);
      ++incarnations[worker];
      current.erase(worker);
    }
    Values& open = current.try_emplace(worker, Values{0, 0}).first->second;
    Values local;
    for (int env = 0; env < 2; ++env) {
      for (int t = 0; t < 6; ++t) {
        open[static_cast<std::size_t>(env)] += random() % 3 == 0 ? 1 + random() % 2 : 0;
        local.push_back(random() % 5 == 0 ? -1 : open[static_cast<std::size_t>(env)]);
      }
    }
    const Values global = renumbered(ids, worker, local, 2);
    for (std::size_t i = 0; i < global.size(); ++i) {
      if (local[i] == -1) {
        CHECK(global[i] == -1);
        continue;
      }
      const auto [it, fresh] = known.try_emplace(
          {worker, static_cast<int>(i / 6), incarnations[worker], local[i]}, highest + 1);
      highest += fresh;
      CHECK(global[i] == it->second);
    }
  }
  CHECK(ids.next() == highest + 1);
}

TEST_CASE("a batch of stopped rollouts is joined without the cells after their ends") {
  ThreadPool pool(2);
  constexpr std::int64_t kEnvs = 2, kSteps = 5;
  const std::vector<std::int64_t> ends{5, 1, 3};
  for (Order order : {Order::stack, Order::time}) {
    const Placement batch(sample(), {3, kEnvs, kSteps, order});
    Bytes slab = poisoned(batch);
    for (std::int64_t worker = 0; worker < 3; ++worker) {
      const Placement one(sample(), {1, kEnvs, kSteps, Order::stack});
      const Bytes rollout = rollout_of(one, worker);
      RolloutHeader header = place_rollout(pool, slab.data(), batch, worker, rollout, one);
      const std::vector<std::int64_t> lengths(kEnvs, ends[static_cast<std::size_t>(worker)]);
      write_header(slab.data(), batch, worker, header, lengths);
    }
    const Placement joined(sample(), {1, kEnvs, 9, Order::stack});
    Bytes target = poisoned(joined);
    compact(pool, target.data(), joined, slab, batch);
    const TensorView from = batch.view(slab.data(), 0);
    const TensorView to = joined.view(target.data(), 0);
    for (std::int64_t p = 0; p < kEnvs; ++p) {
      std::int64_t t = 0;
      for (std::int64_t b = 0; b < 3; ++b) {
        for (std::int64_t s = 0; s < ends[static_cast<std::size_t>(b)]; ++s) {
          CHECK(at<float>(to, 0, p, t++) == at<float>(from, b, p, s));
        }
      }
    }
    const Placement other(sample(), {1, kEnvs, 10, Order::stack});
    Bytes larger = poisoned(other);
    CHECK_THROWS_AS(compact(pool, larger.data(), other, slab, batch), std::invalid_argument);
    RolloutHeader header = read_header(slab, batch, 2);
    write_header(slab.data(), batch, 2, header, std::vector<std::int64_t>{3, 4});
    CHECK_REFUSED(compact(pool, target.data(), joined, slab, batch), "slab", std::invalid_argument);
    write_header(slab.data(), batch, 2, header, std::vector<std::int64_t>{6, 6});
    CHECK_THROWS_AS(compact(pool, target.data(), joined, slab, batch), std::invalid_argument);
  }
}
