// Recording: a recorder with counting environments, and access to the recorded values.
#pragma once

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pycollect/recorder.h"
#include "pycollect/slab_pool.h"
#include "refused.h"

namespace pycollect::tests {

inline const Key kObservation{"observation"};
inline const Key kNextObservation{"next", "observation"};
inline const Key kReward{"next", "reward"};
inline const Key kDone{"next", "done"};
inline const Key kTerminated{"next", "terminated"};
inline const Key kTruncated{"next", "truncated"};
inline const Key kIds{"collector", "traj_ids"};
inline const Key kVersion{"collector", "policy_version"};
inline const Key kMask{"collector", "mask"};
inline const Key kStepCount{"step_count"};
inline const Key kNextStepCount{"next", "step_count"};

// An observation of two numbers, a discrete action and a log-probability.
inline std::vector<Leaf> usual_leaves() {
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

inline std::vector<Leaf> all_leaves() {
  std::vector<Leaf> leaves = usual_leaves();
  leaves.push_back({kStepCount, DType::int64, {1}});
  leaves.push_back({kNextStepCount, DType::int64, {1}});
  leaves.push_back({kVersion, DType::int64, {}});
  leaves.push_back({kMask, DType::boolean, {}});
  return leaves;
}

template <typename T>
inline constexpr DType kDType = DType::float32;
template <>
inline constexpr DType kDType<double> = DType::float64;
template <>
inline constexpr DType kDType<std::int64_t> = DType::int64;
template <>
inline constexpr DType kDType<std::int32_t> = DType::int32;
template <>
inline constexpr DType kDType<std::uint8_t> = DType::uint8;

// An array of numbers whose memory ends with the last number.
template <typename T>
struct Array {
  Dims shape;
  std::vector<T> values;

  TensorView view() { return TensorView::contiguous(values.data(), kDType<T>, shape); }
};

inline Dims with_envs(std::int64_t envs, bool batched, const Dims& frame) {
  Dims shape;
  if (batched) {
    shape.push_back(envs);
  }
  for (std::int64_t extent : frame) {
    shape.push_back(extent);
  }
  return shape;
}

// Environment p observes (n, p) at step n. The caller of step() chooses the flags.
class Recording {
 public:
  Recording(RecorderOptions options, std::int64_t steps, std::vector<Leaf> leaves = usual_leaves(),
            bool live = true, const std::vector<Key>& elsewhere = {}, Order order = Order::stack)
      : P(options.envs),
        batched(options.has_env_dimension()),
        pool(Placement(Layout(leaves), {1, P, steps, order}), 1, true),
        current{with_envs(P, batched, {2}), std::vector<float>(static_cast<std::size_t>(2 * P))},
        recorder(Layout(leaves), {{kObservation, current.view(), live}}, {{"action"}, {"log_prob"}},
                 options, {}, std::nullopt, std::nullopt, elsewhere) {
    restart(0);
  }

  void restart(float n) {
    auto observation = observe(n);
    const std::array<ConstTensorView, 1> views{observation.view()};
    recorder.restart(views);
  }

  void begin(std::int64_t version = 0, RolloutControl control = {}, std::int64_t steps = 0) {
    slab = pool.acquire();
    recorder.begin(slab, 0, version, std::move(control), steps);
  }

  // Steps every environment to observation n, with reward n; objective k has reward n + 100 * k.
  std::int64_t step(float n, std::vector<std::uint8_t> terminated = {},
                    std::vector<std::uint8_t> truncated = {}) {
    const auto count = static_cast<std::size_t>(P);
    terminated.resize(count);
    truncated.resize(count);
    auto observation = observe(n);
    Array<double> reward{with_envs(P, batched, objectives > 1 ? Dims{objectives} : Dims{}), {}};
    for (std::int64_t i = 0; i < P * objectives; ++i) {
      reward.values.push_back(n + 100.0 * static_cast<double>(i % objectives));
    }
    Array<std::uint8_t> ends{with_envs(P, batched, {}), terminated};
    Array<std::uint8_t> cuts{with_envs(P, batched, {}), truncated};
    Array<std::int64_t> action{with_envs(P, batched, {}),
                               std::vector<std::int64_t>(count, static_cast<std::int64_t>(10 * n))};
    Array<float> log_prob{with_envs(P, batched, {1}), std::vector<float>(count, -n)};
    Array<double> wide{observation.shape, {observation.values.begin(), observation.values.end()}};
    const std::array<ConstTensorView, 1> observations{as_doubles ? wide.view()
                                                                 : observation.view()};
    const std::array<ConstTensorView, 2> outputs{action.view(), log_prob.view()};
    if (first) {
      auto following = observe(n);
      for (std::size_t p = 0; p < count; ++p) {
        if ((terminated[p] | truncated[p]) != 0) {
          following.values[2 * p] = *first;
        }
      }
      const std::array<ConstTensorView, 1> followings{following.view()};
      ConstTensorView end = ends.view(), cut = cuts.view();
      end.dtype = cut.dtype = DType::boolean;
      return recorder.step_autoreset({followings, reward.view(), end, cut, outputs}, observations)
          .value_or(kNotRecorded);
    }
    if (as_numbers) {
      return recorder.step(
          OneStep{observations, n, terminated[0] != 0, truncated[0] != 0, outputs});
    }
    return recorder.step({observations, reward.view(), ends.view(), cuts.view(), outputs});
  }

  // Resets the environments that are done to observation n. Other rows hold invalid values.
  void reset(float n) {
    auto observation = observe(n);
    const auto done = recorder.done();
    for (std::size_t p = 0; p < done.size(); ++p) {
      if (done[p] == 0) {
        observation.values[2 * p] = observation.values[2 * p + 1] = -999;
      }
    }
    const std::array<ConstTensorView, 1> views{observation.view()};
    recorder.reset(views);
  }

  RolloutHeader finish() { return recorder.finish({.worker = 3, .incarnation = 1, .sequence = 2}); }

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

  static constexpr std::int64_t kNotRecorded = -999;

  const std::int64_t P;
  const bool batched;
  std::int64_t objectives = 1;  // number of rewards per environment
  bool as_numbers = false;      // pass steps as OneStep
  bool as_doubles = false;      // pass observations as float64, so that they are cast
  std::optional<float> first;   // call step_autoreset(); rows that end go on with this observation
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

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace pycollect::tests
