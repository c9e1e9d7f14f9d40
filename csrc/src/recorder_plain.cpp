// What a Recorder does with each step, and the short way of a plain one: its arrays are those of
// the leaves as they are, there is one reward and one set of flags, and the recorder keeps nothing
// of it but the trajectories. What can be decided for all such steps is decided before the first
// one. What is written is what record() writes.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "pycollect/copy.h"
#include "recorder_state.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

// Whether it is a [P] array without gaps, or one number where P is 1: what is most often given.
bool is_dense(const ConstTensorView& view, std::size_t n, std::size_t item) {
  const bool is_row = view.rank() == 1 && view.shape[0] == static_cast<std::int64_t>(n) &&
                      view.strides[0] == static_cast<std::int64_t>(item);
  return view.device == Device{} && (is_row || (view.rank() == 0 && n == 1));
}

void convert_flat(const char* name, const ConstTensorView& view, const TensorView& target) {
  const std::int64_t n = target.shape[0];
  if (view.count() != n || (view.rank() > 0 && n > 1 && view.shape[0] != n)) {
    throw std::invalid_argument(std::string(name) + ": expected one number for each of " +
                                std::to_string(n) + " envs, got shape " + to_string(view.shape));
  }
  copy(TensorView::contiguous(target.data, target.dtype, view.shape), view);
}

// The values of a [P] array (or [P, 1], or one number) of any numeric type.
template <typename T>
void read_flat(const char* name, const ConstTensorView& view, DType dtype, std::vector<T>& values) {
  const std::size_t n = values.size();
  if (view.dtype == dtype && is_dense(view, n, sizeof(T))) {
    if (n == 1) {  // no call for a few bytes
      std::memcpy(values.data(), view.data, sizeof(T));
    } else {
      std::memcpy(values.data(), view.data, n * sizeof(T));
    }
  } else if (view.dtype == DType::float32 && std::is_same_v<T, double> &&
             is_dense(view, n, sizeof(float))) {
    for (std::size_t i = 0; i < n; ++i) {
      float number = 0;  // by memcpy, because it need not be aligned
      std::memcpy(&number, view.data + i * sizeof(number), sizeof(number));
      values[i] = static_cast<T>(number);
    }
  } else {
    convert_flat(name, view,
                 TensorView::contiguous(values.data(), dtype, {static_cast<std::int64_t>(n)}));
  }
}

}  // namespace

std::int64_t Recorder::State::step(const StepData& data) {
  check_step_is_due();
  if (!leaves_.summary) {
    read_flat("reward", data.reward, DType::float64, rewards_);
    read_flat("terminated", data.terminated, DType::boolean, terminated_);
    read_flat("truncated", data.truncated, DType::boolean, truncated_);
  }
  return record_either_way(data);
}

std::int64_t Recorder::State::step(const OneStep& data) {
  check_step_is_due();
  if (options_.envs != 1) {
    throw std::logic_error("step: expected arrays of " + std::to_string(options_.envs) +
                           " envs, got the numbers of one");
  }
  if (!leaves_.summary) {
    rewards_[0] = data.reward;
    terminated_[0] = static_cast<std::uint8_t>(data.terminated);
    truncated_[0] = static_cast<std::uint8_t>(data.truncated);
  }
  return record_either_way(data);
}

void Recorder::State::check_step_is_due() const {
  if (!slab_ || step_ >= steps_) {
    throw std::logic_error("step: expected a rollout with steps left");
  }
  if (resets_due_ > 0) {
    const auto env = std::find(done_.begin(), done_.end(), std::uint8_t{1}) - done_.begin();
    throw std::logic_error("step: expected a reset() of env " + std::to_string(env) +
                           ", whose episode ended with the step before");
  }
}

// Reward and flags stand in rewards_, terminated_ and truncated_, unless the observations have
// them.
template <typename Data>
std::int64_t Recorder::State::record_either_way(const Data& data) {
  if (may_be_plain_ && data.states.empty() && takes_plainly(data.outputs, data.observation)) {
    return options_.envs == 1 ? record_plain<true>(data.observation)
                              : record_plain<false>(data.observation);
  }
  const std::int64_t due = record(data.observation, data.outputs, data.states);
  moves_.forget();
  return due;
}

// Whether steps may be plain, by what the recorder is told at construction.
bool Recorder::State::may_be_plain() const {
  const bool keeps_more = leaves_.summary || leaves_.is_init || leaves_.step_count ||
                          leaves_.next_step_count || leaves_.steps_had || !leaves_.states.empty();
  const bool all_written =
      std::all_of(leaves_.observations.begin(), leaves_.observations.end(),
                  [](const RecorderLeaves::Observation& own) { return own.written(); });
  return leaves_.standard && all_written && !keeps_more && !options_.skips_after_done &&
         !options_.leaves_out_dummies;
}

// Given are the policy's outputs, then the observations.
void Recorder::State::plan_moves() {
  for (LeafRows& output : leaves_.outputs) {
    moves_.add(output, moves_.add_given(output));
  }
  for (RecorderLeaves::Observation& observation : leaves_.observations) {
    const std::size_t source = moves_.add_given(*observation.written());
    if (observation.next) {
      moves_.add(*observation.next, source);
    }
    if (observation.root && observation.current) {
      moves_.add_ahead(*observation.root, source);
    }
  }
  moves_.add(leaves_.ids, moves_.add_kept(open_.ids.data()));
  moves_.add(leaves_.standard->reward, moves_.add_kept(reward_row_.data()));
}

// Whether all arrays are those of the leaves. Others are left to record(), which casts or refuses
// them.
bool Recorder::State::takes_plainly(std::span<const ConstTensorView> outputs,
                                    std::span<const ConstTensorView> observation) {
  return outputs.size() == leaves_.outputs.size() &&
         outputs.size() + observation.size() == moves_.given() && moves_.take(0, outputs) &&
         moves_.take(outputs.size(), observation);
}

// `is_one`: there is one environment, which the compiler is told.
template <bool is_one>
std::int64_t Recorder::State::record_plain(std::span<const ConstTensorView> observation) {
  const bool stopped = is_stopped(step_ + 1);
  if (stopped) {
    steps_ = step_ + 1;
  }
  const std::size_t envs = is_one ? 1 : rewards_.size();
  for (std::size_t p = 0; p < envs; ++p) {
    reward_row_[p] = static_cast<float>(rewards_[p]);
  }
  const bool is_last = step_ + 1 == steps_;
  moves_.write(step_, is_last);
  if (is_last || has_live_) {
    write_current(observation, is_last);
  }
  for (std::size_t p = 0; p < envs; ++p) {
    ++open_.lengths[p];
    open_.returns[p] += rewards_[p];
  }
  collected_ += static_cast<std::int64_t>(envs);
  frames_ += static_cast<std::int64_t>(envs);
  if (options_.max_frames_per_traj > 0) {
    cut_trajectories();
  }
  end_episodes(envs);
  ++step_;
  control_.count_step();
  return stopped ? -1 - resets_due_ : resets_due_;
}

void Recorder::State::write_current(std::span<const ConstTensorView> observation, bool is_last) {
  for (std::size_t i = 0; i < observation.size(); ++i) {
    RecorderLeaves::Observation& leaves = leaves_.observations[i];
    if (leaves.current && (is_last || leaves.live)) {
      leaves.write_current(observation[i], Fit::plain);
    }
  }
}

std::int64_t Recorder::step(const StepData& data) { return state_->step(data); }

std::int64_t Recorder::step(const OneStep& data) { return state_->step(data); }

}  // namespace pycollect::inline PYCOLLECT_ABI
