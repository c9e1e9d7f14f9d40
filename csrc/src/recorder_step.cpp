// The general path of Recorder::step(), for any step. See recorder_plain.cpp for the fast path of
// most steps, and recorder.cpp for the functions that run once per rollout.
#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "pycollect/copy.h"
#include "recorder_state.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

[[noreturn]] void refuse_count(const char* what, std::size_t expected, std::size_t actual) {
  throw std::invalid_argument(std::string(what) + ": expected " + std::to_string(expected) +
                              " arrays, got " + std::to_string(actual));
}

void check_count(const char* what, std::size_t expected, std::size_t actual) {
  if (expected != actual) {
    refuse_count(what, expected, actual);
  }
}

// Calls visit(p) for each environment with a flag of 1. Few flags are set, so it checks eight at
// once.
template <typename Visit>
void for_each_set(const std::vector<std::uint8_t>& flags, const Visit& visit) {
  constexpr std::size_t kTogether = sizeof(std::uint64_t);
  for (std::size_t first = 0; first < flags.size(); first += kTogether) {
    std::uint64_t bits = 0;
    if (first + kTogether <= flags.size()) {
      std::memcpy(&bits, flags.data() + first, kTogether);
    } else {
      std::memcpy(&bits, flags.data() + first, flags.size() - first);
    }
    for (; bits != 0; bits &= bits - 1) {
      const int byte = std::endian::native == std::endian::little ? std::countr_zero(bits) / 8
                                                                  : 7 - std::countr_zero(bits) / 8;
      visit(static_cast<std::int64_t>(first) + byte);
    }
  }
}

}  // namespace

std::int64_t Recorder::State::record(std::span<const ConstTensorView> observation,
                                     std::span<const ConstTensorView> outputs,
                                     std::span<const ConstTensorView> states) {
  check_observation(observation, true);
  check_outputs(outputs);
  check_states(states);
  choose_envs();
  const std::int64_t reached = this->reached();
  const bool stopped = is_stopped(reached);
  if (stopped) {
    steps_ = reached;  // before the writes below, which depend on it
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
  if (options_.leaves_out_dummies) {
    start_at(skipped_, observation);
  } else {
    drop_dummies();
  }
  advance();
  control_.count_step();
  return stopped ? -1 - resets_due_ : resets_due_;
}

// Checks the arrays. `stepped`: they are from a step, not from a reset, and go to other leaves.
void Recorder::State::check_observation(std::span<const ConstTensorView> values, bool stepped) {
  check_count("observation", leaves_.observations.size(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const RecorderLeaves::Observation& observation = leaves_.observations[i];
    if (const auto& leaf = stepped ? observation.written() : observation.current) {
      observation_fits_[i] = leaf->check(values[i]);
    }
  }
}

void Recorder::State::check_outputs(std::span<const ConstTensorView> values) {
  check_count("outputs", leaves_.outputs.size(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    output_fits_[i] = leaves_.outputs[i].check(values[i], true);
  }
}

void Recorder::State::check_states(std::span<const ConstTensorView> values) {
  check_count("states", leaves_.states.size(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    state_fits_[i] = leaves_.states[i].written().check(values[i], true);
  }
}

// With leaves_out_dummies: decides for each environment whether this step is a frame or a dummy.
void Recorder::State::choose_envs() {
  if (!options_.leaves_out_dummies) {
    return;
  }
  for (std::size_t p = 0; p < skips_.size(); ++p) {
    skipped_[p] = static_cast<std::uint8_t>(apart_.behind[p] & skips_[p]);
    apart_.records[p] = static_cast<std::uint8_t>(apart_.behind[p] & ~skips_[p]);
    skips_[p] = static_cast<std::uint8_t>(skips_[p] & ~skipped_[p]);
  }
}

// The number of steps of the most advanced environment.
std::int64_t Recorder::State::most_steps() const {
  return options_.leaves_out_dummies ? *std::max_element(apart_.at.begin(), apart_.at.end())
                                     : step_;
}

// The number of steps of the most advanced environment, including this step.
std::int64_t Recorder::State::reached() const {
  if (!options_.leaves_out_dummies) {
    return step_ + 1;
  }
  std::int64_t most = 0;
  for (std::size_t p = 0; p < apart_.at.size(); ++p) {
    most = std::max(most, apart_.at[p] + apart_.records[p]);
  }
  return most;
}

// Writes into the current step of each environment, or `ahead` steps after it.
void Recorder::State::write_ahead(LeafRows& leaf, std::int64_t ahead, const ConstTensorView& value,
                                  Fit fit) const {
  if (!options_.leaves_out_dummies) {
    if (step_ + ahead < steps_) {
      leaf.write(step_ + ahead, value, fit);
    }
    return;
  }
  for_each_set(apart_.records, [&](std::int64_t p) {
    if (const std::int64_t t = step_of(p) + ahead; t < steps_) {
      leaf.write_env(p, t, value, fit);
    }
  });
}

// Writes into the memory from which the policy chooses the next action.
void Recorder::State::write_now(LeafRows& current, const ConstTensorView& value, Fit fit) const {
  if (current.is_memory_of(value, fit)) {
    return;
  }
  if (!options_.leaves_out_dummies) {
    current.write(0, value, fit);
    return;
  }
  for_each_set(apart_.records, [&](std::int64_t p) { current.write_env(p, 0, value, fit); });
}

template <typename T>
void Recorder::State::put_numbers(LeafRows& leaf, const std::vector<T>& values) const {
  if (!options_.leaves_out_dummies) {
    leaf.put_all(step_, values);
    return;
  }
  for_each_set(apart_.records, [&](std::int64_t p) {
    leaf.put(p, step_of(p), values[static_cast<std::size_t>(p)]);
  });
}

void Recorder::State::write_outputs(std::span<const ConstTensorView> values) {
  for (std::size_t i = 0; i < leaves_.outputs.size(); ++i) {
    write_ahead(leaves_.outputs[i], 0, values[i], output_fits_[i]);
  }
}

void Recorder::State::write_observations(std::span<const ConstTensorView> values) {
  const bool is_current_due = step_ + 1 == steps_ || options_.leaves_out_dummies;
  for (std::size_t i = 0; i < leaves_.observations.size(); ++i) {
    RecorderLeaves::Observation& observation = leaves_.observations[i];
    const Fit fit = observation_fits_[i];
    if (observation.next) {
      write_ahead(*observation.next, 0, values[i], fit);
    }
    if (!observation.current) {
      continue;
    }
    if (observation.root) {
      write_ahead(*observation.root, 1, values[i], fit);
    }
    if (is_current_due || observation.live) {
      write_now(*observation.current, values[i], fit);
    }
  }
}

void Recorder::State::write_states(std::span<const ConstTensorView> values) {
  for (std::size_t i = 0; i < leaves_.states.size(); ++i) {
    RecorderLeaves::State& state = leaves_.states[i];
    const Fit fit = state_fits_[i];
    write_now(state.current, values[i], fit);
    if (state.next) {
      write_ahead(*state.next, 0, values[i], fit);
    }
    if (state.root) {
      write_ahead(*state.root, 1, values[i], fit);
    }
  }
}

// Records the values that the recorder computes for the frames of this step.
void Recorder::State::count_frames() {
  put_numbers(leaves_.ids, open_.ids);
  if (leaves_.step_count) {
    put_numbers(*leaves_.step_count, open_.lengths);
  }
  std::int64_t frames = 0;
  for (std::size_t p = 0; p < done_.size(); ++p) {
    if (is_recorded(p)) {
      ++frames;
      ++open_.lengths[p];
    }
  }
  if (options_.leaves_out_dummies) {
    for_each_set(apart_.records, [this](std::int64_t p) {
      const std::size_t first = static_cast<std::size_t>(p) * objectives_;
      add_rewards(first, first + objectives_);
    });
  } else {
    add_rewards(0, rewards_.size());
  }
  if (leaves_.next_step_count) {
    put_numbers(*leaves_.next_step_count, open_.lengths);
  }
  if (leaves_.steps_had) {
    leaves_.steps_had->put_all(0, open_.lengths);
  }
  if (leaves_.standard) {
    write_ahead(leaves_.standard->reward, 0, reward_view_, Fit::plain);
  }
  if (leaves_.is_init) {
    for (std::size_t p = 0; p < done_.size(); ++p) {
      if (is_recorded(p)) {
        leaves_.is_init->current.put(static_cast<std::int64_t>(p), 0, std::uint8_t{0});
      }
    }
  }
  collected_ += frames;
  frames_ += frames;
}

// Adjusts the flags: truncates trajectories at max_frames_per_traj, and clears the flags of dummy
// steps.
void Recorder::State::complete_flags() {
  if (options_.leaves_out_dummies) {
    for (std::size_t p = 0; p < truncated_.size(); ++p) {
      if (!is_recorded(p)) {
        terminated_[p] = truncated_[p] = 0;
      }
    }
  }
  if (options_.max_frames_per_traj > 0) {
    cut_trajectories();
  }
  if (options_.skips_after_done && !options_.leaves_out_dummies) {
    skipped_.swap(skips_);
    std::fill(skips_.begin(), skips_.end(), std::uint8_t{0});
    for_each_set(skipped_, [this](std::int64_t p) {
      const auto i = static_cast<std::size_t>(p);
      terminated_[i] = truncated_[i] = 0;
    });
  }
}

void Recorder::State::cut_trajectories() {
  for (std::size_t p = 0; p < truncated_.size(); ++p) {
    const bool is_cut = is_recorded(p) && open_.lengths[p] == options_.max_frames_per_traj;
    if (options_.leaves_out_dummies) {
      apart_.cut[p] = static_cast<std::uint8_t>(is_cut && !(terminated_[p] | truncated_[p]));
    }
    truncated_[p] = static_cast<std::uint8_t>((truncated_[p] != 0) | is_cut);
  }
}

// Ends are rare: the flags of the rollout are zeros at first, and only set flags are written.
void Recorder::State::end_episodes() {
  const std::uint8_t* const terminated = terminated_.data();
  const std::uint8_t* const truncated = truncated_.data();
  std::uint8_t* const done = done_.data();
  const std::size_t envs = done_.size();
  std::uint8_t any = 0;
  for (std::size_t p = 0; p < envs; ++p) {
    done[p] = static_cast<std::uint8_t>((terminated[p] | truncated[p]) != 0);
    any |= done[p];
  }
  resets_due_ = 0;
  if (any != 0) {
    end_done_episodes();
  }
}

void Recorder::State::end_done_episodes() {
  for_each_set(done_, [this](std::int64_t p) { end_episode(p); });
}

void Recorder::State::end_episode(std::int64_t p) {
  const auto i = static_cast<std::size_t>(p);
  if (leaves_.standard) {
    const RecorderLeaves::Standard& flags = *leaves_.standard;
    const std::int64_t t = step_of(p);
    flags.terminated.put(p, t, static_cast<std::uint8_t>(terminated_[i] != 0));
    flags.truncated.put(p, t, static_cast<std::uint8_t>(truncated_[i] != 0));
    flags.done.put(p, t, std::uint8_t{1});
  }
  const double* const returns = open_.returns.data() + i * objectives_;
  const double total = std::accumulate(returns, returns + objectives_, 0.0);
  episodes_.push_back({options_.first_env + p, open_.lengths[i], total});
  if (objectives_ > 1) {
    episodes_.back().objectives.assign(returns, returns + objectives_);
  }
  const bool is_cut = options_.leaves_out_dummies && apart_.cut[i];
  if (options_.skips_after_done && !is_cut) {
    done_[i] = 0;
    skips_[i] = 1;
  } else {
    ++resets_due_;
  }
}

// Marks the cells of dummy steps as uncollected, and starts a trajectory after each.
void Recorder::State::drop_dummies() {
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

void Recorder::State::advance() {
  if (!options_.leaves_out_dummies) {
    ++step_;
    return;
  }
  step_ = steps_;
  for (std::size_t p = 0; p < apart_.at.size(); ++p) {
    apart_.at[p] += apart_.records[p];
    apart_.behind[p] = static_cast<std::uint8_t>(apart_.at[p] < steps_);
    step_ = std::min(step_, apart_.at[p]);
  }
}

// Starts a trajectory of environment p, at `step` of the rollout if one is open.
void Recorder::State::start_trajectory(std::int64_t p, std::int64_t step) {
  const auto i = static_cast<std::size_t>(p);
  ++open_.ids[i];
  open_.lengths[i] = 0;
  std::fill_n(open_.returns.begin() + p * static_cast<std::ptrdiff_t>(objectives_), objectives_, 0);
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

void Recorder::State::reset(std::span<const ConstTensorView> observation) {
  check_observation(observation, false);
  start_at(done_, observation);
  std::fill(done_.begin(), done_.end(), std::uint8_t{0});
  resets_due_ = 0;
}

// Starts trajectories of `envs` at `observation`, which was checked.
void Recorder::State::start_at(const std::vector<std::uint8_t>& envs,
                               std::span<const ConstTensorView> observation) {
  for (std::size_t i = 0; i < leaves_.observations.size(); ++i) {
    const RecorderLeaves::Observation& target = leaves_.observations[i];
    if (!target.current) {
      continue;
    }
    const Fit fit = observation_fits_[i];
    const bool is_same_memory = target.current->is_memory_of(observation[i], fit);
    for_each_set(envs, [&](std::int64_t p) {
      if (target.root && slab_ && step_of(p) < steps_) {
        target.root->write_env(p, step_of(p), observation[i], fit);
      }
      if (!is_same_memory) {
        target.current->write_env(p, 0, observation[i], fit);
      }
    });
  }
  for_each_set(envs, [this](std::int64_t p) {
    skips_[static_cast<std::size_t>(p)] = 0;
    start_trajectory(p, step_of(p));
  });
}

void Recorder::reset(std::span<const ConstTensorView> observation) { owned().reset(observation); }

}  // namespace pycollect::inline PYCOLLECT_ABI
