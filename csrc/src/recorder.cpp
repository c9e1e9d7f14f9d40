#include "pycollect/recorder.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>
#include <utility>

#include "pycollect/copy.h"

namespace pycollect::inline PYCOLLECT_ABI {
namespace {

void check_count(const char* what, std::size_t expected, std::size_t came) {
  if (expected != came) {
    throw std::invalid_argument(std::string(what) + ": expected " + std::to_string(expected) +
                                " arrays, got " + std::to_string(came));
  }
}

// The values of a [P] array (or of [P, 1], or of one number) of any numeric type.
template <typename T>
void read_flat(const char* name, const TensorView& view, DType dtype, std::span<T> values) {
  const auto n = static_cast<std::int64_t>(values.size());
  if (view.count() != n || (view.rank() > 0 && n > 1 && view.shape[0] != n)) {
    throw std::invalid_argument(std::string(name) + ": expected one number for each of " +
                                std::to_string(n) + " envs, got shape " + to_string(view.shape));
  }
  if (view.dtype == dtype && view.is_contiguous()) {
    std::memcpy(values.data(), view.data, values.size_bytes());
  } else {
    copy(TensorView::contiguous(values.data(), dtype, view.shape), view);
  }
}

}  // namespace

Recorder::Recorder(Layout layout, const std::vector<ObservationSpec>& observations,
                   const std::vector<Key>& outputs, RecorderOptions options,
                   const std::vector<StateSpec>& states, const std::optional<TensorView>& is_init,
                   const std::optional<TensorView>& step_count, const std::vector<Key>& elsewhere)
    : layout_(std::move(layout)),
      options_(options),
      leaves_(layout_, observations, outputs, options, states, is_init, step_count, elsewhere) {
  const auto n = static_cast<std::size_t>(options.envs);
  envs_.resize(n);
  done_.resize(n);
  flags_.resize(2 * n);
  rewards_.resize(n);
}

void Recorder::check_resets(std::span<const TensorView> observation) const {
  check_count("observation", leaves_.observations.size(), observation.size());
  for (std::size_t i = 0; i < leaves_.observations.size(); ++i) {
    if (leaves_.observations[i].current) {
      leaves_.observations[i].current->check(observation[i]);
    }
  }
}

void Recorder::restart(std::span<const TensorView> observation) {
  check_resets(observation);
  if (slab_) {
    throw std::logic_error("restart: expected finish() or abandon() of the rollout before it");
  }
  for (std::size_t i = 0; i < leaves_.observations.size(); ++i) {
    leaves_.observations[i].write_current(observation[i]);
  }
  std::fill(done_.begin(), done_.end(), std::uint8_t{0});
  resets_due_ = 0;
  for (std::int64_t p = 0; p < options_.envs; ++p) {
    start_trajectory(p, 0);
  }
  restarted_ = true;
}

void Recorder::begin(std::shared_ptr<Slab> slab, std::int64_t row, std::int64_t policy_version,
                     RolloutControl control, std::int64_t steps) {
  if (!restarted_) {
    throw std::logic_error("begin: expected restart() before the first rollout");
  }
  if (slab_) {
    throw std::logic_error("begin: expected finish() or abandon() of the rollout before it");
  }
  if (!slab) {
    throw std::invalid_argument("slab: expected one, got null");
  }
  const Placement& placement = slab->placement();
  if (placement.layout().fingerprint() != layout_.fingerprint() ||
      placement.geometry().envs != options_.envs) {
    throw std::invalid_argument("slab: expected this recorder's layout and " +
                                std::to_string(options_.envs) + " envs, got another one");
  }
  placement.header_offset(row);  // throws for a row that is none
  const std::int64_t most = placement.geometry().steps;
  if (steps < 0 || steps > most) {
    throw std::invalid_argument("steps: expected 1 to " + std::to_string(most) +
                                ", which the slab has, or 0 for these, got " +
                                std::to_string(steps));
  }
  leaves_.bind(*slab, row);
  // Nothing throws from here on.
  slab_ = std::move(slab);
  control_ = std::move(control);
  row_ = row;
  steps_ = steps == 0 ? most : steps;
  step_ = 0;
  collected_ = 0;
  episodes_before_ = episodes_.size();
  policy_version_ = policy_version;
  for (Env& env : envs_) {
    env.last_collected = -1;
  }
  clear_root_flags();
  for (const RecorderLeaves::Observation& observation : leaves_.observations) {
    if (observation.root) {
      observation.root->write(0, observation.view);
    }
  }
  for (const RecorderLeaves::State& state : leaves_.states) {
    if (state.root) {
      state.root->write(0, state.view);
    }
  }
  if (leaves_.is_init) {
    leaves_.is_init->root.write(0, leaves_.is_init->view);
  }
}

// An env that ended is reset before its next step, so the state acted on is never a done one.
void Recorder::clear_root_flags() {
  if (!leaves_.standard) {
    return;
  }
  for (const LeafRows& flag : leaves_.standard->root_flags) {
    for (std::int64_t p = 0; p < options_.envs; ++p) {
      flag.fill(p, 0, steps_, 0);
    }
  }
}

std::int64_t Recorder::step(const StepData& data) {
  check_step_is_due();
  if (leaves_.summary) {
    return record(data.observation, data.outputs, data.states);
  }
  const auto n = static_cast<std::size_t>(options_.envs);
  const std::span flags(flags_);
  read_flat("reward", data.reward, DType::float64, std::span(rewards_));
  read_flat("terminated", data.terminated, DType::boolean, flags.first(n));
  read_flat("truncated", data.truncated, DType::boolean, flags.last(n));
  return record(data.observation, data.outputs, data.states);
}

std::int64_t Recorder::step(const OneStep& data) {
  check_step_is_due();
  if (options_.envs != 1) {
    throw std::logic_error("step: expected arrays of " + std::to_string(options_.envs) +
                           " envs, got the numbers of one");
  }
  if (leaves_.summary) {
    return record(data.observation, data.outputs, data.states);
  }
  rewards_[0] = data.reward;
  flags_[0] = static_cast<std::uint8_t>(data.terminated);
  flags_[1] = static_cast<std::uint8_t>(data.truncated);
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

// Reward and flags stand in rewards_ and flags_, unless the observations have them.
std::int64_t Recorder::record(std::span<const TensorView> observation,
                              std::span<const TensorView> outputs,
                              std::span<const TensorView> states) {
  check_arrays(observation, outputs, states);
  const bool stopped = is_stopped();
  if (stopped) {
    steps_ = step_ + 1;  // all that is written or not because of a rollout's end follows
  }
  write_outputs(outputs);
  write_observations(observation);
  write_states(states);
  if (leaves_.summary) {
    leaves_.summary->read(observation, rewards_, std::span(flags_).first(envs_.size()));
  }
  const auto n = static_cast<std::size_t>(options_.envs);
  for (std::int64_t p = 0; p < options_.envs; ++p) {
    const auto i = static_cast<std::size_t>(p);
    set_is_init(p, step_ + 1, false);
    if (envs_[i].skip) {
      clear_cell(p);
      done_[i] = 0;
      start_trajectory(p, step_ + 1);
    } else {
      collect(p, rewards_[i], flags_[i] != 0, flags_[n + i] != 0);
    }
  }
  ++step_;
  control_.count_step();
  resets_due_ = std::count(done_.begin(), done_.end(), std::uint8_t{1});
  return stopped ? -1 - resets_due_ : resets_due_;
}

void Recorder::check_arrays(std::span<const TensorView> observation,
                            std::span<const TensorView> outputs,
                            std::span<const TensorView> states) const {
  check_count("observation", leaves_.observations.size(), observation.size());
  check_count("outputs", leaves_.outputs.size(), outputs.size());
  check_count("states", leaves_.states.size(), states.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    leaves_.outputs[i].check(outputs[i], true);
  }
  for (std::size_t i = 0; i < observation.size(); ++i) {
    if (const std::optional<LeafRows>& leaf = leaves_.observations[i].written()) {
      leaf->check(observation[i]);
    }
  }
  for (std::size_t i = 0; i < states.size(); ++i) {
    leaves_.states[i].written().check(states[i], true);
  }
}

bool Recorder::is_stopped() const {
  return step_ + 1 >= control_.min_steps && step_ + 1 < steps_ && control_.is_stopped();
}

void Recorder::write_outputs(std::span<const TensorView> values) {
  for (std::size_t i = 0; i < leaves_.outputs.size(); ++i) {
    leaves_.outputs[i].write_checked(step_, values[i]);
  }
}

void Recorder::write_observations(std::span<const TensorView> values) {
  const bool last = step_ + 1 == steps_;
  for (std::size_t i = 0; i < leaves_.observations.size(); ++i) {
    const RecorderLeaves::Observation& observation = leaves_.observations[i];
    if (observation.next) {
      observation.next->write_checked(step_, values[i]);
    }
    if (!observation.current) {
      continue;
    }
    if (observation.root && !last) {
      observation.root->write_checked(step_ + 1, values[i]);
    }
    if (last || observation.live) {
      observation.write_current(values[i]);
    }
  }
}

void Recorder::write_states(std::span<const TensorView> values) {
  for (std::size_t i = 0; i < leaves_.states.size(); ++i) {
    const RecorderLeaves::State& state = leaves_.states[i];
    if (!state.current.is_memory_of(values[i])) {
      state.current.write_checked(0, values[i]);
    }
    if (state.next) {
      state.next->write_checked(step_, values[i]);
    }
    if (state.root && step_ + 1 < steps_) {
      state.root->write_checked(step_ + 1, values[i]);
    }
  }
}

// Whether this step, the next to be chosen on, is the first of its trajectory.
void Recorder::set_is_init(std::int64_t p, std::int64_t step, bool first) {
  if (!leaves_.is_init) {
    return;
  }
  leaves_.is_init->current.put(p, 0, static_cast<std::uint8_t>(first));
  if (slab_ && step < steps_) {
    leaves_.is_init->root.put(p, step, static_cast<std::uint8_t>(first));
  }
}

void Recorder::set_length(std::int64_t p, std::int64_t length) {
  envs_[static_cast<std::size_t>(p)].length = length;
  if (leaves_.steps_had) {
    leaves_.steps_had->put(p, 0, length);
  }
}

void Recorder::collect(std::int64_t p, double reward, bool terminated, bool truncated) {
  Env& env = envs_[static_cast<std::size_t>(p)];
  leaves_.ids.put(p, step_, env.trajectory);
  for (const LeafRows& mask : leaves_.masks) {
    mask.put(p, step_, std::uint8_t{1});
  }
  for (const LeafRows& version : leaves_.versions) {
    version.put(p, step_, policy_version_);
  }
  if (!leaves_.step_counts.empty()) {
    leaves_.step_counts[0].put(p, step_, env.length);
    leaves_.step_counts[1].put(p, step_, env.length + 1);
  }
  set_length(p, env.length + 1);
  env.total_reward += reward;
  env.last_collected = step_;
  ++collected_;
  ++frames_;

  truncated = truncated || env.length == options_.max_frames_per_traj;
  const bool done = terminated || truncated;
  if (leaves_.standard) {
    leaves_.standard->reward.put(p, step_, static_cast<float>(reward));
    leaves_.standard->terminated.put(p, step_, static_cast<std::uint8_t>(terminated));
    leaves_.standard->truncated.put(p, step_, static_cast<std::uint8_t>(truncated));
    leaves_.standard->done.put(p, step_, static_cast<std::uint8_t>(done));
  }
  done_[static_cast<std::size_t>(p)] = done && !options_.skips_after_done;
  env.skip = done && options_.skips_after_done;
  if (done) {
    episodes_.push_back({p, env.length, env.total_reward});
  }
}

void Recorder::clear_cell(std::int64_t p) {
  for (const LeafRows* leaf : leaves_.all) {
    leaf->fill(p, step_, 1, 0);
  }
  leaves_.ids.put(p, step_, std::int64_t{-1});
}

// A trajectory whose first action is chosen at this step (of the rollout, if there is one).
void Recorder::start_trajectory(std::int64_t p, std::int64_t step) {
  Env& env = envs_[static_cast<std::size_t>(p)];
  ++env.trajectory;
  set_length(p, 0);
  env.total_reward = 0;
  env.skip = false;
  for (const RecorderLeaves::State& state : leaves_.states) {
    state.current.write_env(p, 0, state.initial);
    if (state.root && slab_ && step < steps_) {
      state.root->write_env(p, step, state.initial);
    }
  }
  set_is_init(p, step, true);
}

void Recorder::reset(std::span<const TensorView> observation) {
  check_resets(observation);
  for (std::size_t i = 0; i < leaves_.observations.size(); ++i) {
    const RecorderLeaves::Observation& target = leaves_.observations[i];
    if (!target.current) {
      continue;
    }
    const bool is_there = target.current->is_memory_of(observation[i]);
    for (std::int64_t p = 0; p < options_.envs; ++p) {
      if (done_[static_cast<std::size_t>(p)] == 0) {
        continue;
      }
      if (target.root && slab_ && step_ < steps_) {
        target.root->write_env(p, step_, observation[i]);
      }
      if (!is_there) {
        target.current->write_env(p, 0, observation[i]);
      }
    }
  }
  for (std::int64_t p = 0; p < options_.envs; ++p) {
    std::uint8_t& done = done_[static_cast<std::size_t>(p)];
    if (done != 0) {
      start_trajectory(p, step_);
      done = 0;
    }
  }
  resets_due_ = 0;
}

void Recorder::flag_last_frames() {
  std::vector<const LeafRows*> flags;
  if (leaves_.standard) {
    flags = {&leaves_.standard->done, &leaves_.standard->truncated};
  } else {
    // Each "truncated" and the "done" beside it; a "done" without one tells of terminals alone.
    std::set<Key> truncating;
    const auto node = [](const Key& key) { return key.parent(); };
    for (const RecorderLeaves::Observation& observation : leaves_.observations) {
      if (observation.next && observation.next->leaf().key.back() == "truncated") {
        truncating.insert(node(observation.next->leaf().key));
      }
    }
    for (const RecorderLeaves::Observation& observation : leaves_.observations) {
      if (!observation.next) {
        continue;
      }
      const Key& key = observation.next->leaf().key;
      if ((key.back() == "done" || key.back() == "truncated") && truncating.contains(node(key))) {
        flags.push_back(&*observation.next);
      }
    }
  }
  for (const LeafRows* flag : flags) {
    for (std::int64_t p = 0; p < options_.envs; ++p) {
      const std::int64_t t = envs_[static_cast<std::size_t>(p)].last_collected;
      if (t >= 0) {
        flag->fill(p, t, 1, 1);
      }
    }
  }
}

// The cells that the rollout has not come to.
void Recorder::clear_after_end() {
  const std::int64_t left = slab_->placement().geometry().steps - steps_;
  for (std::int64_t p = 0; left > 0 && p < options_.envs; ++p) {
    for (const LeafRows* leaf : leaves_.all) {
      leaf->fill(p, steps_, left, 0);
    }
    leaves_.ids.fill(p, steps_, left, 0xFF);
  }
}

RolloutHeader Recorder::finish(const RolloutName& name) {
  if (!slab_ || step_ != steps_) {
    throw std::logic_error("finish: expected a rollout whose every step was recorded, " +
                           std::to_string(steps_left()) + " are left");
  }
  if (options_.set_truncated) {
    flag_last_frames();
  }
  clear_after_end();
  RolloutHeader header;
  header.worker = name.worker;
  header.incarnation = name.incarnation;
  header.sequence = name.sequence;
  header.policy_version = policy_version_;
  header.frames = collected_;
  header.generation = slab_->generation();
  const std::vector<std::int64_t> lengths(envs_.size(), steps_);
  write_header(slab_->data(), slab_->placement(), row_, header, lengths);
  header = read_header({slab_->data(), static_cast<std::size_t>(slab_->bytes())},
                       slab_->placement(), row_);
  stream_fence();
  slab_.reset();
  return header;
}

void Recorder::abandon() {
  if (slab_) {
    episodes_.resize(episodes_before_);  // they ended in frames that nobody will see
    slab_.reset();
  }
}

std::vector<Episode> Recorder::take_episodes() {
  std::vector<Episode> taken = episodes_;
  episodes_.clear();
  return taken;
}

}  // namespace pycollect::inline PYCOLLECT_ABI
