// Environments that fall behind others, because their dummy steps take no cells.
#include <doctest/doctest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "recording.h"

using namespace pycollect;
using namespace pycollect::tests;

namespace {

RecorderOptions behind(std::int64_t envs) {
  return {.envs = envs, .batched = true, .skips_after_done = true, .leaves_out_dummies = true};
}

std::string rows_behind(const Recording& r) {
  std::string text;
  for (std::uint8_t flag : r.recorder.behind()) {
    text += std::to_string(flag);
  }
  return text;
}

}  // namespace

TEST_CASE("a dummy takes no cell, and its env catches up") {
  Recording r(behind(2), 3, all_leaves());
  r.begin(8);
  CHECK(rows_behind(r) == "11");
  CHECK(r.step(1, {0, 1}) == 0);  // no env must be reset
  CHECK(r.recorder.done()[1] == 0);
  CHECK(r.step(50, {0, 1}) == 0);  // env 1: the reset observation; its flags are ignored
  CHECK(r.step(51) == 0);
  CHECK(rows_behind(r) == "01");
  CHECK(r.recorder.steps_left() == 1);
  CHECK(r.current.values[0] == 51.0F);
  CHECK(r.step(52, {1, 1}) == 0);  // env 0 has all of its frames
  CHECK(r.recorder.steps_left() == 0);
  CHECK(r.current.values[0] == 51.0F);
  CHECK(r.current.values[2] == 52.0F);
  CHECK(r.finish().frames == 6);
  CHECK(r.recorder.frames() == 6);

  const std::vector<std::vector<float>> roots{{0, 1, 50}, {0, 50, 51}};
  const std::vector<std::vector<float>> nexts{{1, 50, 51}, {1, 51, 52}};
  const std::vector<std::vector<std::int64_t>> counts{{0, 1, 2}, {0, 0, 1}};
  const std::vector<std::vector<std::int64_t>> ids{{0, 0, 0}, {0, 1, 1}};
  for (std::int64_t p = 0; p < 2; ++p) {
    CHECK(r.flags(kMask, p) == "111");
    for (std::int64_t t = 0; t < 3; ++t) {
      const auto i = static_cast<std::size_t>(p), j = static_cast<std::size_t>(t);
      CHECK(r.number(kObservation, t, p) == roots[i][j]);
      CHECK(r.number(kNextObservation, t, p) == nexts[i][j]);
      CHECK(r.number(kReward, t, p) == nexts[i][j]);
      CHECK(r.integer({"action"}, t, p) == static_cast<std::int64_t>(10 * nexts[i][j]));
      CHECK(r.number({"log_prob"}, t, p) == -nexts[i][j]);
      CHECK(r.integer(kIds, t, p) == ids[i][j]);
      CHECK(r.integer(kStepCount, t, p) == counts[i][j]);
      CHECK(r.integer(kNextStepCount, t, p) == counts[i][j] + 1);
      CHECK(r.integer(kVersion, t, p) == 8);
    }
  }
  CHECK(r.flags(kDone, 0) == "000");
  CHECK(r.flags(kDone, 1) == "101");
  const std::vector<Episode> episodes = r.recorder.take_episodes();
  REQUIRE(episodes.size() == 2);
  CHECK(episodes[1].total_reward == 103.0);  // without the reward of the dummy
  CHECK(episodes[1].length == 2);

  r.begin();  // the first step is the dummy of the last done
  r.step(60);
  CHECK(r.recorder.steps_left() == 3);
  r.step(61);
  CHECK(r.number(kObservation, 0, 0) == 51.0F);
  CHECK(r.number(kObservation, 0, 1) == 60.0F);
  CHECK(r.number(kNextObservation, 0, 1) == 61.0F);
  CHECK(r.integer(kIds, 0, 1) == 2);
}

TEST_CASE("a trajectory that is cut is reset, even if other envs ended") {
  RecorderOptions options = behind(2);
  options.max_frames_per_traj = 2;
  Recording r(options, 3, all_leaves());
  r.begin();
  CHECK(r.step(1) == 0);
  CHECK(r.step(2, {0, 1}) == 1);  // env 1 ended by itself at the maximum length
  CHECK(r.recorder.done()[0] == 1);
  CHECK(r.recorder.done()[1] == 0);
  r.reset(40);
  CHECK(r.step(41) == 0);  // env 1: its reset
  CHECK(r.step(42) == 0);
  CHECK(r.finish().frames == 6);
  CHECK(r.flags(kTruncated, 0) == "010");
  CHECK(r.flags(kTruncated, 1) == "010");
  CHECK(r.flags(kTerminated, 1) == "010");
  CHECK(r.number(kObservation, 2, 0) == 40.0F);
  CHECK(r.number(kObservation, 2, 1) == 41.0F);
  CHECK(r.number(kNextObservation, 2, 1) == 42.0F);
}

TEST_CASE("set_truncated flags the last frame of each env") {
  RecorderOptions options = behind(2);
  options.set_truncated = true;
  Recording r(options, 2);
  r.begin();
  r.step(1, {0, 1});
  r.step(2);
  r.step(3);
  r.finish();
  CHECK(r.flags(kTruncated, 0) == "01");
  CHECK(r.flags(kTruncated, 1) == "01");
}

TEST_CASE("a stopped rollout ends at the most advanced env, and the other envs catch up") {
  Recording r(behind(2), 9);
  const auto stop = std::make_shared<std::atomic<std::uint64_t>>(0);
  r.begin(0, {.stop = stop, .number = 1});
  r.step(1, {0, 1});
  r.step(2);
  stop->store(1);
  CHECK(r.step(3) == -1);
  CHECK(r.recorder.steps_left() == 1);
  CHECK(r.step(4) == 0);
  CHECK(r.finish().frames == 6);
  CHECK(r.number(kNextObservation, 2, 1) == 4.0F);
  CHECK(r.number(kObservation, 3, 0) == 0.0F);
  CHECK(r.integer(kIds, 3, 0) == -1);
}

TEST_CASE("each frame has its version, and the header has the oldest") {
  Recording r(behind(2), 2, all_leaves());
  r.begin(1);
  r.recorder.set_policy_version(2);
  r.step(1, {0, 1});
  r.recorder.set_policy_version(3);
  r.step(2);
  r.recorder.set_policy_version(4);
  r.step(3);
  CHECK(r.finish().policy_version == 2);
  CHECK(r.integer(kVersion, 1, 0) == 3);
  CHECK(r.integer(kVersion, 1, 1) == 4);
}
