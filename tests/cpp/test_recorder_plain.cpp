// Steps whose arrays are the leaves' own are written in a shorter way than others.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "recording.h"

using namespace pycollect;
using namespace pycollect::tests;

namespace {

// Every cell of both, also those behind the rollout's end.
void check_alike(const Recording& one, const Recording& other) {
  const Placement& placement = one.slab->placement();
  for (std::size_t i = 0; i < placement.layout().size(); ++i) {
    const TensorView rows = one.slab->rows(i, 0), others = other.slab->rows(i, 0);
    const auto bytes = static_cast<std::size_t>(placement.layout()[i].frame_bytes());
    for (std::int64_t p = 0; p < one.P; ++p) {
      for (std::int64_t t = 0; t < placement.geometry().steps; ++t) {
        INFO(to_string(placement.layout()[i].key), " of env ", p, " at step ", t);
        CHECK(std::memcmp(rows[p][t].data, others[p][t].data, bytes) == 0);
      }
    }
  }
}

// The same step of both; where they are reset they are, too.
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

}  // namespace

TEST_CASE("plain steps and others stand in one rollout as if all were cast") {
  constexpr std::int64_t kSteps = 37;
  for (const std::int64_t envs : {1, 2, 7, 8, 16, 33}) {
    for (const bool live : {true, false}) {
      for (const std::int64_t longest : {0, 4}) {
        CAPTURE(envs);
        const RecorderOptions options{.envs = envs,
                                      .batched = live,
                                      .max_frames_per_traj = longest,
                                      .set_truncated = longest == 4};
        Recording mixed(options, kSteps, usual_leaves(), live);
        Recording cast(options, kSteps, usual_leaves(), live);
        cast.as_doubles = true;
        mixed.as_numbers = envs == 1 && longest == 0;
        float n = 0;
        for (const int every : {1000, 2, 3, 9, 1}) {  // that many-th step is cast
          for (const std::int64_t steps : {37, 20, 16, 1}) {
            mixed.begin(5, {}, steps);
            cast.begin(5, {}, steps);
            for (std::int64_t t = 0; t < steps; ++t) {
              n += 1;
              mixed.as_doubles = (t + 1) % every == 0;
              step_both(mixed, cast, n);
            }
            const RolloutHeader header = mixed.finish();
            CHECK(cast.finish().frames == header.frames);
            check_alike(mixed, cast);
          }
        }
      }
    }
  }
}

TEST_CASE("a rollout of plain steps that is stopped has nothing behind its end") {
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
