// What a Recorder does with each step; recorder.cpp has what it does with each rollout.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "pycollect/copy.h"
#include "pycollect/recorder.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

void check_count(const char* what, std::size_t expected, std::size_t came) {
  if (expected != came) {
    throw std::invalid_argument(std::string(what) + ": expected " + std::to_string(expected) +
                                " arrays, got " + std::to_string(came));
  }
}

// Whether it is a [P] array without gaps, or one number where P is 1: what is most often given.
bool is_dense(const TensorView& view, std::size_t n, std::size_t item) {
  const bool is_row = view.rank() == 1 && view.shape[0] == static_cast<std::int64_t>(n) &&
                      view.strides[0] == static_cast<std::int64_t>(item);
  return view.device == Device{} && (is_row || (view.rank() == 0 && n == 1));
}

void convert_flat(const char* name, const TensorView& view, const TensorView& target) {
  const std::int64_t n = target.shape[0];
  if (view.count() != n || (view.rank() > 0 && n > 1 && view.shape[0] != n)) {
    throw std::invalid_argument(std::string(name) + ": expected one number for each of " +
                                std::to_string(n) + " envs, got shape " + to_string(view.shape));
  }
  copy(TensorView::contiguous(target.data, target.dtype, view.shape), view);
}

// The values of a [P] array (or [P, 1], or one number) of any numeric type.
template <typename T>
void read_flat(const char* name, const TensorView& view, DType dtype, std::vector<T>& values) {
  const std::size_t n = values.size();
  if (view.dtype == dtype && is_dense(view, n, sizeof(T))) {
    std::memcpy(values.data(), view.data, n * sizeof(T));
  } else if (view.dtype == DType::float32 && std::is_same_v<T, double> &&
             is_dense(view, n, sizeof(float))) {
    for (std::size_t i = 0; i < n; ++i) {
      float number;  // by memcpy, because it need not be aligned
      std::memcpy(&number, view.data + i * sizeof(number), sizeof(number));
      values[i] = static_cast<T>(number);
    }
  } else {
    convert_flat(name, view,
                 TensorView::contiguous(values.data(), dtype, {static_cast<std::int64_t>(n)}));
  }
}

// Calls visit(p) for the envs whose flag is 1.
template <typename Visit>
void for_each_set(const std::vector<std::uint8_t>& flags, const Visit& visit) {
  const std::uint8_t* const begin = flags.data();
  const std::uint8_t* const end = begin + flags.size();
  for (const std::uint8_t* at = begin; at != end; ++at) {
    at = static_cast<const std::uint8_t*>(std::memchr(at, 1, static_cast<std::size_t>(end - at)));
    if (at == nullptr) {
      return;
    }
    visit(at - begin);
  }
}

}  // namespace

std::int64_t Recorder::step(const StepData& data) {
  check_step_is_due();
  if (!leaves_.summary) {
    read_flat("reward", data.reward, DType::float64, rewards_);
    read_flat("terminated", data.terminated, DType::boolean, terminated_);
    read_flat("truncated", data.truncated, DType::boolean, truncated_);
  }
  return record(data.observation, data.outputs, data.states);
}

std::int64_t Recorder::step(const OneStep& data) {
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
  return record(data.observation, data.outputs, data.states);
}

void Recorder::check_step_is_due() const {
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
std::int64_t Recorder::record(std::span<const TensorView> observation,
                              std::span<const TensorView> outputs,
                              std::span<const TensorView> states) {
  check_observation(observation, true);
  check_outputs(outputs);
  check_states(states);
  const bool stopped = is_stopped();
  if (stopped) {
    steps_ = step_ + 1;  // all that is written or not because of a rollout's end follows
  }
  write_outputs(outputs);
  write_observations(observation);
  write_states(states);
  if (leaves_.summary) {
    leaves_.summary->read(observation, rewards_, terminated_);
    std::fill(truncated_.begin(), truncated_.end(), std::uint8_t{0});
  }
  count_frames();
  complete_flags();
  end_episodes();
  drop_dummies();
  ++step_;
  control_.count_step();
  return stopped ? -1 - resets_due_ : resets_due_;
}

// Those of a step go to other leaves than those of a reset.
void Recorder::check_observation(std::span<const TensorView> values, bool stepped) {
  check_count("observation", leaves_.observations.size(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const RecorderLeaves::Observation& observation = leaves_.observations[i];
    if (const auto& leaf = stepped ? observation.written() : observation.current) {
      observation_fits_[i] = leaf->check(values[i]);
    }
  }
}

void Recorder::check_outputs(std::span<const TensorView> values) {
  check_count("outputs", leaves_.outputs.size(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    output_fits_[i] = leaves_.outputs[i].check(values[i], true);
  }
}

void Recorder::check_states(std::span<const TensorView> values) {
  check_count("states", leaves_.states.size(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    state_fits_[i] = leaves_.states[i].written().check(values[i], true);
  }
}

bool Recorder::is_stopped() const {
  return step_ + 1 >= control_.min_steps && step_ + 1 < steps_ && control_.is_stopped();
}

void Recorder::write_outputs(std::span<const TensorView> values) {
  for (std::size_t i = 0; i < leaves_.outputs.size(); ++i) {
    leaves_.outputs[i].write(step_, values[i], output_fits_[i]);
  }
}

void Recorder::write_observations(std::span<const TensorView> values) {
  const bool last = step_ + 1 == steps_;
  for (std::size_t i = 0; i < leaves_.observations.size(); ++i) {
    const RecorderLeaves::Observation& observation = leaves_.observations[i];
    const Fit fit = observation_fits_[i];
    if (observation.next) {
      observation.next->write(step_, values[i], fit);
    }
    if (!observation.current) {
      continue;
    }
    if (observation.root && !last) {
      observation.root->write(step_ + 1, values[i], fit);
    }
    if (last || observation.live) {
      observation.write_current(values[i], fit);
    }
  }
}

void Recorder::write_states(std::span<const TensorView> values) {
  for (std::size_t i = 0; i < leaves_.states.size(); ++i) {
    const RecorderLeaves::State& state = leaves_.states[i];
    const Fit fit = state_fits_[i];
    if (!state.current.is_memory_of(values[i], fit)) {
      state.current.write(0, values[i], fit);
    }
    if (state.next) {
      state.next->write(step_, values[i], fit);
    }
    if (state.root && step_ + 1 < steps_) {
      state.root->write(step_ + 1, values[i], fit);
    }
  }
}

// What the recorder itself knows of the step's frames.
void Recorder::count_frames() {
  leaves_.ids.put_all(step_, open_.ids);
  if (leaves_.step_count) {
    leaves_.step_count->put_all(step_, open_.lengths);
  }
  for (std::size_t p = 0; p < rewards_.size(); ++p) {
    ++open_.lengths[p];
    open_.returns[p] += rewards_[p];
    reward_row_[p] = static_cast<float>(rewards_[p]);
  }
  if (leaves_.next_step_count) {
    leaves_.next_step_count->put_all(step_, open_.lengths);
  }
  if (leaves_.steps_had) {
    leaves_.steps_had->put_all(0, open_.lengths);
  }
  if (leaves_.standard) {
    leaves_.standard->reward.put_all(step_, reward_row_);
  }
  if (leaves_.is_init) {
    leaves_.is_init->current.put_first(1, std::uint8_t{0});
  }
  collected_ += options_.envs;
  frames_ += options_.envs;
}

// Which flags count: a trajectory is cut where it is as long as it may be, and a dummy has none.
void Recorder::complete_flags() {
  if (options_.max_frames_per_traj > 0) {
    for (std::size_t p = 0; p < truncated_.size(); ++p) {
      const bool is_cut = open_.lengths[p] == options_.max_frames_per_traj;
      truncated_[p] = static_cast<std::uint8_t>((truncated_[p] != 0) | is_cut);
    }
  }
  if (options_.skips_after_done) {
    skipped_.swap(skips_);
    std::fill(skips_.begin(), skips_.end(), std::uint8_t{0});
    for_each_set(skipped_, [this](std::int64_t p) {
      const auto i = static_cast<std::size_t>(p);
      terminated_[i] = truncated_[i] = 0;
    });
  }
}

// Ends are rare: the rollout's flags are zeros, and only those that are set are written.
void Recorder::end_episodes() {
  const std::uint8_t* const terminated = terminated_.data();
  const std::uint8_t* const truncated = truncated_.data();
  std::uint8_t* const done = done_.data();
  std::uint8_t any = 0;
  for (std::size_t p = 0, n = done_.size(); p < n; ++p) {
    done[p] = static_cast<std::uint8_t>((terminated[p] | truncated[p]) != 0);
    any |= done[p];
  }
  resets_due_ = 0;
  if (any != 0) {
    for_each_set(done_, [this](std::int64_t p) { end_episode(p); });
  }
}

void Recorder::end_episode(std::int64_t p) {
  const auto i = static_cast<std::size_t>(p);
  if (leaves_.standard) {
    const RecorderLeaves::Standard& flags = *leaves_.standard;
    flags.terminated.put(p, step_, static_cast<std::uint8_t>(terminated_[i] != 0));
    flags.truncated.put(p, step_, static_cast<std::uint8_t>(truncated_[i] != 0));
    flags.done.put(p, step_, std::uint8_t{1});
  }
  episodes_.push_back({p, open_.lengths[i], open_.returns[i]});
  if (options_.skips_after_done) {
    done_[i] = 0;
    skips_[i] = 1;
  } else {
    ++resets_due_;
  }
}

// The cells of dummies are uncollected; a trajectory begins behind each.
void Recorder::drop_dummies() {
  if (!options_.skips_after_done) {
    return;
  }
  for_each_set(skipped_, [this](std::int64_t p) {
    for (const LeafRows* leaf : leaves_.all) {
      leaf->fill(p, step_, 1, 0);
    }
    leaves_.ids.put(p, step_, std::int64_t{-1});
    --collected_;
    --frames_;
    start_trajectory(p, step_ + 1);
  });
}

// A trajectory whose first action is chosen at this step (of the rollout, if there is one).
void Recorder::start_trajectory(std::int64_t p, std::int64_t step) {
  const auto i = static_cast<std::size_t>(p);
  ++open_.ids[i];
  open_.lengths[i] = 0;
  open_.returns[i] = 0;
  if (leaves_.steps_had) {
    leaves_.steps_had->put(p, 0, std::int64_t{0});
  }
  const bool has_root = slab_ && step < steps_;
  for (const RecorderLeaves::State& state : leaves_.states) {
    state.current.write_env(p, 0, state.initial, state.initial_fit);
    if (state.root && has_root) {
      state.root->write_env(p, step, state.initial, state.initial_fit);
    }
  }
  if (leaves_.is_init) {
    leaves_.is_init->current.put(p, 0, std::uint8_t{1});
    if (has_root) {
      leaves_.is_init->root.put(p, step, std::uint8_t{1});
    }
  }
}

void Recorder::reset(std::span<const TensorView> observation) {
  check_observation(observation, false);
  for (std::size_t i = 0; i < leaves_.observations.size(); ++i) {
    const RecorderLeaves::Observation& target = leaves_.observations[i];
    if (!target.current) {
      continue;
    }
    const bool has_root = target.root && slab_ && step_ < steps_;
    const Fit fit = observation_fits_[i];
    const bool is_there = target.current->is_memory_of(observation[i], fit);
    for_each_set(done_, [&](std::int64_t p) {
      if (has_root) {
        target.root->write_env(p, step_, observation[i], fit);
      }
      if (!is_there) {
        target.current->write_env(p, 0, observation[i], fit);
      }
    });
  }
  for_each_set(done_, [this](std::int64_t p) { start_trajectory(p, step_); });
  std::fill(done_.begin(), done_.end(), std::uint8_t{0});
  resets_due_ = 0;
}

}  // namespace pycollect::inline PYCOLLECT_ABI
