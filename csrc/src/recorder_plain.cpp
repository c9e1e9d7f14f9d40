// The fast path of Recorder::step() for plain steps. A plain step has arrays that match their
// leaves exactly, one reward and one set of flags per environment, and no data beyond that except
// trajectories. Conditions that hold for all plain steps are checked once, in advance. The result
// is the same as that of record().
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "pycollect/copy.h"
#include "pycollect/env.h"
#include "recorder_state.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

constexpr const char* kSeveralRewards =
    "; for a vector of rewards, give the environment a reward_space, a Box of shape [k]";

// Whether the view is a contiguous [P] array, or one number if P is 1. This is the usual case.
bool is_dense(const ConstTensorView& view, std::size_t n, std::size_t item) {
  const bool is_row = view.rank() == 1 && view.shape[0] == static_cast<std::int64_t>(n) &&
                      view.strides[0] == static_cast<std::int64_t>(item);
  return view.device == Device{} && (is_row || (view.rank() == 0 && n == 1));
}

void convert_flat(const char* name, const ConstTensorView& view, const TensorView& target) {
  const std::int64_t n = target.shape[0];
  if (view.count() != n || (view.rank() > 0 && n > 1 && view.shape[0] != n)) {
    throw std::invalid_argument(std::string(name) + ": expected one number for each of " +
                                std::to_string(n) + " environments, got shape " +
                                to_string(view.shape) +
                                (std::string_view(name) == "reward" ? kSeveralRewards : ""));
  }
  copy(TensorView::contiguous(target.data, target.dtype, view.shape), view);
}

// Reads the values of an array of shape [P], [P, 1] or, for P = 1, [], of any numeric type.
template <typename T>
void read_flat(const char* name, const ConstTensorView& view, DType dtype, std::vector<T>& values) {
  const std::size_t n = values.size();
  if (view.dtype == dtype && is_dense(view, n, sizeof(T))) {
    std::memcpy(values.data(), view.data, n * sizeof(T));
  } else if (view.dtype == DType::float32 && std::is_same_v<T, double> &&
             is_dense(view, n, sizeof(float))) {
    for (std::size_t i = 0; i < n; ++i) {
      float number = 0;  // memcpy, because it may be unaligned
      std::memcpy(&number, view.data + i * sizeof(number), sizeof(number));
      values[i] = static_cast<T>(number);
    }
  } else {
    convert_flat(name, view,
                 TensorView::contiguous(values.data(), dtype, {static_cast<std::int64_t>(n)}));
  }
}

// Whether the array has one number, at its address.
bool is_one(const ConstTensorView& view) {
  return view.device.kind == DeviceKind::cpu &&
         (view.rank() == 0 || (view.rank() == 1 && view.shape[0] == 1));
}

template <typename T>
double number_in(const ConstTensorView& view) {
  T number{};  // memcpy, because it may be unaligned
  std::memcpy(&number, view.data, sizeof(number));
  return number;
}

bool flag_in(const ConstTensorView& view) { return *view.data != std::byte{0}; }

// The outcome of one environment, if its arrays have the usual types.
bool read_one(const StepData& data, Outcome& outcome) {
  if (!is_one(data.reward) || !is_one(data.terminated) || !is_one(data.truncated) ||
      data.terminated.dtype != DType::boolean || data.truncated.dtype != DType::boolean) {
    return false;
  }
  if (data.reward.dtype == DType::float32) {
    outcome.reward = number_in<float>(data.reward);
  } else if (data.reward.dtype == DType::float64) {
    outcome.reward = number_in<double>(data.reward);
  } else {
    return false;
  }
  outcome.terminated = flag_in(data.terminated);
  outcome.truncated = flag_in(data.truncated);
  return true;
}

}  // namespace

void Recorder::State::read_rewards(const ConstTensorView& view) {
  if (objectives_ == 1) {
    return read_flat("reward", view, DType::float64, rewards_);
  }
  if (view.shape != reward_view_.shape || view.device.kind != DeviceKind::cpu) {
    throw std::invalid_argument("reward: expected shape " + to_string(reward_view_.shape) +
                                ", which the environment's reward_space declares, got shape " +
                                to_string(view.shape));
  }
  copy(TensorView::contiguous(rewards_.data(), DType::float64, view.shape), view);
}

std::int64_t Recorder::State::step(const StepData& data) {
  check_step_is_due();
  const bool may_be_plain = may_be_plain_ && data.states.empty();
  if (Outcome outcome; may_be_plain && is_one() && read_one(data, outcome)) {
    return record_one<false>(data, outcome);
  }
  if (!leaves_.summary) {
    read_rewards(data.reward);
    read_flat("terminated", data.terminated, DType::boolean, terminated_);
    read_flat("truncated", data.truncated, DType::boolean, truncated_);
  }
  return may_be_plain ? record_many(data) : record(data.observation, data.outputs, data.states);
}

std::int64_t Recorder::State::step(const OneStep& data) {
  check_step_is_due();
  if (!is_one()) {
    throw std::logic_error("step: expected an array of " + std::to_string(rewards_.size()) +
                           " rewards, got one number");
  }
  return may_be_plain_ && data.states.empty() ? record_one<false>(data, data)
                                              : record_any(data, data);
}

// Only single environments skip the checks: with several, checking is a small part of a step.
void Recorder::State::repeat(const StepData& data) {
  Outcome outcome;
  repeated_ = data;
  is_repeated_plain_ = may_be_plain_ && data.states.empty() && is_one() &&
                       data.reward.dtype == DType::float64 && read_one(data, outcome) &&
                       moves_.fit(data.outputs, data.observation);
}

std::int64_t Recorder::State::step_again() {
  if (!repeated_) {
    throw std::logic_error("step_again: call repeat() first");
  }
  if (!is_repeated_plain_) {
    return step(*repeated_);
  }
  check_step_is_due();
  const StepData& data = *repeated_;
  const Outcome outcome{number_in<double>(data.reward), flag_in(data.terminated),
                        flag_in(data.truncated)};
  return record_one<true>(data, outcome);
}

void Recorder::State::refuse_step() const {
  if (steps_left() <= 0) {
    throw std::logic_error("step: the rollout has no steps left; call finish(), then begin()");
  }
  const auto env = std::find(done_.begin(), done_.end(), std::uint8_t{1}) - done_.begin();
  throw std::logic_error("step: expected a reset() of env " + std::to_string(env) +
                         " after its episode ended");
}

// Whether steps can be plain, given the constructor's arguments.
bool Recorder::State::may_be_plain() const {
  const bool keeps_more = leaves_.summary || leaves_.is_init || leaves_.step_count ||
                          leaves_.next_step_count || leaves_.steps_had || !leaves_.states.empty();
  const bool all_written =
      std::all_of(leaves_.observations.begin(), leaves_.observations.end(),
                  [](const RecorderLeaves::Observation& own) { return own.written(); });
  return leaves_.standard && all_written && !keeps_more && !options_.skips_after_done &&
         !options_.leaves_out_dummies;
}

void Recorder::State::plan_moves() {
  for (LeafRows& output : leaves_.outputs) {
    moves_.add_output(output);
  }
  for (RecorderLeaves::Observation& own : leaves_.observations) {
    moves_.add_observation(*own.written(), own.next ? &*own.next : nullptr,
                           own.root && own.current ? &*own.root : nullptr);
  }
  moves_.add_kept(leaves_.ids, open_.ids.data());
  moves_.add_kept(leaves_.standard->reward, reward_row_.data());
}

// Records a plain step. Reward and flags are in rewards_, terminated_ and truncated_.
std::int64_t Recorder::State::record_many(const StepData& data) {
  const std::size_t envs = done_.size(), numbers = rewards_.size();
  for (std::size_t i = 0; i < numbers; ++i) {
    reward_row_[i] = static_cast<float>(rewards_[i]);
  }
  const bool stopped = is_stopped(step_ + 1);
  if (!write_plain<false>(data, stopped)) {
    return record(data.observation, data.outputs, data.states);
  }
  for (std::size_t p = 0; p < envs; ++p) {
    ++open_.lengths[p];
  }
  for (std::size_t i = 0; i < numbers; ++i) {
    open_.returns[i] += rewards_[i];
  }
  if (options_.max_frames_per_traj > 0) {
    cut_trajectories();
  }
  end_episodes();
  return end_plain(static_cast<std::int64_t>(envs), stopped);
}

std::optional<std::int64_t> Recorder::State::step_autoreset(const StepData& data,
                                                            std::span<const ConstTensorView> last) {
  check_step_is_due();
  if (!can_autoreset(data)) {
    return std::nullopt;
  }
  read_flat("terminated", data.terminated, DType::boolean, terminated_);
  read_flat("truncated", data.truncated, DType::boolean, truncated_);
  const auto is_set = [](std::uint8_t flag) { return flag != 0; };
  const bool any = std::any_of(terminated_.begin(), terminated_.end(), is_set) ||
                   std::any_of(truncated_.begin(), truncated_.end(), is_set);
  if (any && !fit_observations(last)) {
    return std::nullopt;
  }
  read_rewards(data.reward);
  const std::int64_t result = record_many(data);
  if (any) {
    begin_after(last);
  }
  return result < 0 ? -1 : 0;
}

bool Recorder::State::can_autoreset(const StepData& data) const {
  const std::size_t envs = done_.size();
  // For one environment, step() decides whether a number without a dimension is allowed.
  const auto is_row = [&](const ConstTensorView& view) {
    return view.rank() == 1 && is_dense(view, envs, item_size(view.dtype));
  };
  const auto are_flags = [&](const ConstTensorView& view) {
    return view.dtype == DType::boolean && is_row(view);
  };
  const DType type = data.reward.dtype;
  return may_be_plain_ && objectives_ == 1 && options_.max_frames_per_traj == 0 &&
         data.states.empty() && are_flags(data.terminated) && are_flags(data.truncated) &&
         (type == DType::float32 || type == DType::float64) && is_row(data.reward) &&
         moves_.fit(data.outputs, data.observation);
}

bool Recorder::State::fit_observations(std::span<const ConstTensorView> values) const {
  return std::equal(values.begin(), values.end(), leaves_.observations.begin(),
                    leaves_.observations.end(),
                    [](const ConstTensorView& value, const RecorderLeaves::Observation& own) {
                      return own.written()->is_plain(value);
                    });
}

// Writes the last observations of the episodes that the last step ended, and starts the next ones.
void Recorder::State::begin_after(std::span<const ConstTensorView> last) {
  for (std::size_t p = 0; p < done_.size(); ++p) {
    if (done_[p] == 0) {
      continue;
    }
    const auto env = static_cast<std::int64_t>(p);
    for (std::size_t i = 0; i < last.size(); ++i) {
      if (const auto& next = leaves_.observations[i].next) {
        next->write_env(env, step_ - 1, last[i], Fit::plain);
      }
    }
    start_trajectory(env, step_);
    done_[p] = 0;
  }
  resets_due_ = 0;
}

// Records a plain step of one environment. Its reward and flags are members of `numbers`.
template <bool known, typename Data, typename Numbers>
std::int64_t Recorder::State::record_one(const Data& data, const Numbers& numbers) {
  reward_row_[0] = static_cast<float>(numbers.reward);
  const bool stopped = is_stopped(step_ + 1);
  if (!write_plain<known>(data, stopped)) {
    return record_any(data, numbers);
  }
  const std::int64_t length = ++open_.lengths[0];
  open_.returns[0] += numbers.reward;
  const bool truncated = numbers.truncated || length == options_.max_frames_per_traj;
  const bool done = numbers.terminated || truncated;
  done_[0] = static_cast<std::uint8_t>(done);
  resets_due_ = 0;
  if (done) {
    terminated_[0] = static_cast<std::uint8_t>(numbers.terminated);
    truncated_[0] = static_cast<std::uint8_t>(truncated);
    end_done_episodes();
  }
  return end_plain(1, stopped);
}

// Records any step of one environment.
template <typename Data, typename Numbers>
std::int64_t Recorder::State::record_any(const Data& data, const Numbers& numbers) {
  rewards_[0] = numbers.reward;
  terminated_[0] = static_cast<std::uint8_t>(numbers.terminated);
  truncated_[0] = static_cast<std::uint8_t>(numbers.truncated);
  return record(data.observation, data.outputs, data.states);
}

// Writes a plain step. Returns false if an array does not match its leaf exactly; record() then
// casts it or throws. Some cells may have been written by then. A retry overwrites them, or they
// never become visible because they are after the end of the rollout or the rollout is abandoned.
// `stopped`: the rollout ends with this step. `known`: the arrays are known to match.
template <bool known, typename Data>
bool Recorder::State::write_plain(const Data& data, bool stopped) {
  const bool is_last = stopped || step_ + 1 == steps_;
  if (!moves_.write<known>(step_, is_last, data.outputs, data.observation)) {
    moves_.forget();
    return false;
  }
  if (stopped) {
    steps_ = step_ + 1;
  }
  if (is_last || has_live_) {
    write_current(data.observation, is_last);
  }
  return true;
}

void Recorder::State::write_current(std::span<const ConstTensorView> observation, bool is_last) {
  for (std::size_t i = 0; i < observation.size(); ++i) {
    RecorderLeaves::Observation& leaves = leaves_.observations[i];
    const bool is_same_memory =
        observation[i].data == leaves.view.data;  // checked first: the usual case
    if (!is_same_memory && leaves.current && (is_last || leaves.live)) {
      leaves.write_current(observation[i], Fit::plain);
    }
  }
}

std::int64_t Recorder::step(const StepData& data) { return owned().step(data); }

std::optional<std::int64_t> Recorder::step_autoreset(const StepData& data,
                                                     std::span<const ConstTensorView> last) {
  return owned().step_autoreset(data, last);
}

void Recorder::repeat(const StepData& data) { owned().repeat(data); }

std::int64_t Recorder::step_again() { return owned().step_again(); }

std::int64_t Recorder::step(const OneStep& data) { return owned().step(data); }

}  // namespace pycollect::inline PYCOLLECT_ABI
