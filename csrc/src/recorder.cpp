#include "pycollect/recorder.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "pycollect/copy.h"
#include "recorder_state.h"

namespace pycollect::inline PYCOLLECT_ABI {

Recorder::State::State(Layout layout, const std::vector<ObservationSpec>& observations,
                       const std::vector<Key>& outputs, const RecorderOptions& options,
                       const std::vector<StateSpec>& states,
                       const std::optional<TensorView>& is_init,
                       const std::optional<TensorView>& step_count,
                       const std::vector<Key>& elsewhere)
    : layout_(std::move(layout)),
      options_(options),
      leaves_(layout_, observations, outputs, options, states, is_init, step_count, elsewhere) {
  const auto n = static_cast<std::size_t>(options.envs);
  observation_fits_.resize(observations.size());
  output_fits_.resize(outputs.size());
  state_fits_.resize(states.size());
  open_.ids.resize(n, -1);
  open_.lengths.resize(n);
  objectives_ = leaves_.standard ? leaves_.standard->objectives() : 1;
  for (std::vector<double>* numbers : {&open_.returns, &rewards_}) {
    numbers->resize(n * objectives_);
  }
  reward_row_.resize(rewards_.size());
  if (leaves_.standard) {
    reward_view_ = TensorView::contiguous(reinterpret_cast<std::byte*>(reward_row_.data()),
                                          DType::float32, leaves_.standard->reward.step_shape());
  }
  for (std::vector<std::uint8_t>* flags : {&terminated_, &truncated_, &done_, &skips_, &skipped_}) {
    flags->resize(n);
  }
  apart_.behind.resize(n);
  if (options.leaves_out_dummies) {
    apart_.at.resize(n);
    apart_.records.resize(n);
    apart_.cut.resize(n);
  }
  may_be_plain_ = may_be_plain();
  if (may_be_plain_) {
    plan_moves();
    has_live_ = std::any_of(leaves_.observations.begin(), leaves_.observations.end(),
                            [](const RecorderLeaves::Observation& own) { return own.live; });
  }
}

void Recorder::State::restart(std::span<const ConstTensorView> observation) {
  check_observation(observation, false);
  if (slab_) {
    throw std::logic_error("restart: call finish() or abandon() for the open rollout first");
  }
  for (std::size_t i = 0; i < leaves_.observations.size(); ++i) {
    if (leaves_.observations[i].current) {
      leaves_.observations[i].write_current(observation[i], observation_fits_[i]);
    }
  }
  std::fill(done_.begin(), done_.end(), std::uint8_t{0});
  std::fill(skips_.begin(), skips_.end(), std::uint8_t{0});
  resets_due_ = 0;
  for (std::int64_t p = 0; p < options_.envs; ++p) {
    start_trajectory(p, 0);
  }
  restarted_ = true;
}

void Recorder::State::begin(std::shared_ptr<Slab> slab, std::int64_t row,
                            std::int64_t policy_version, RolloutControl control,
                            std::int64_t steps) {
  if (!restarted_) {
    throw std::logic_error(
        "begin: call restart() first, and after abandon() if an observation is not live");
  }
  if (slab_) {
    throw std::logic_error("begin: call finish() or abandon() for the open rollout first");
  }
  if (!slab) {
    throw std::invalid_argument("slab: expected a slab, got null");
  }
  const Placement& placement = slab->placement();
  if (placement.layout().fingerprint() != layout_.fingerprint() ||
      placement.geometry().envs != options_.envs_of_worker()) {
    throw std::invalid_argument("slab: expected this recorder's layout and " +
                                std::to_string(options_.envs_of_worker()) +
                                " envs, got a different slab");
  }
  placement.header_offset(row);  // throws for an unknown row
  const std::int64_t most = placement.geometry().steps;
  if (steps < 0 || steps > most) {
    throw std::invalid_argument("steps: expected 1 to " + std::to_string(most) +
                                ", the steps of the slab, or 0 for all of them, got " +
                                std::to_string(steps));
  }
  leaves_.bind(*slab, row, options_.first_env);
  moves_.forget();
  // Nothing throws from here on.
  slab_ = std::move(slab);
  control_ = std::move(control);
  row_ = row;
  steps_ = steps == 0 ? most : steps;
  step_ = 0;
  collected_ = 0;
  episodes_before_ = episodes_.size();
  policy_version_ = policy_version;
  if (options_.leaves_out_dummies) {
    std::fill(apart_.at.begin(), apart_.at.end(), 0);
    std::fill(apart_.behind.begin(), apart_.behind.end(), std::uint8_t{1});
  }
  write_constants();
  write_first_roots();
}

void Recorder::State::set_policy_version(std::int64_t version) {
  if (collected_ == 0) {
    policy_version_ = version;
  }
  if (!slab_ || !leaves_.version) {
    return;
  }
  for (std::int64_t p = 0; p < options_.envs; ++p) {
    for (std::int64_t t = step_of(p); t < steps_; ++t) {
      leaves_.version->put(p, t, version);
    }
  }
}

bool Recorder::State::stop(std::span<State* const> beside) {
  if (!control_.is_stopped()) {
    return false;
  }
  std::int64_t steps = most_steps();
  for (const State* recorder : beside) {
    steps = std::max(steps, recorder->most_steps());
  }
  ++steps;
  if (steps < control_.min_steps || steps >= steps_) {
    return false;
  }
  steps_ = steps;
  for (State* recorder : beside) {
    recorder->steps_ = steps;
  }
  return true;
}

// Writes the values that are equal in all frames or in almost all. Exceptions are written with
// their step.
void Recorder::State::write_constants() {
  if (leaves_.standard) {
    const RecorderLeaves::Standard& flags = *leaves_.standard;
    for (const LeafRows* flag : {&flags.done, &flags.terminated, &flags.truncated}) {
      flag->put_first(steps_, std::uint8_t{0});
    }
    // An environment that ended is reset before its next step, so the root flags are never set.
    for (const LeafRows& flag : flags.root_flags) {
      flag.put_first(steps_, std::uint8_t{0});
    }
  }
  if (leaves_.is_init) {
    leaves_.is_init->root.put_first(steps_, std::uint8_t{0});
  }
  if (leaves_.mask) {
    leaves_.mask->put_first(steps_, std::uint8_t{1});
  }
  if (leaves_.version) {
    leaves_.version->put_first(steps_, policy_version_);
  }
}

void Recorder::State::write_first_roots() {
  for (RecorderLeaves::Observation& observation : leaves_.observations) {
    if (observation.root) {
      observation.root->write(0, observation.view, Fit::plain);
    }
  }
  for (RecorderLeaves::State& state : leaves_.states) {
    if (state.root) {
      state.root->write(0, state.view, Fit::plain);
    }
  }
  if (leaves_.is_init) {  // write_constants() has cleared the other steps
    for (std::int64_t p = 0; p < options_.envs; ++p) {
      leaves_.is_init->root.write_env(p, 0, leaves_.is_init->view, Fit::plain);
    }
  }
}

void Recorder::State::flag_last_frames() {
  std::vector<const LeafRows*> flags;
  if (leaves_.standard) {
    flags = {&leaves_.standard->done, &leaves_.standard->truncated};
  } else {
    // Set each "truncated" and the "done" with the same parent. A "done" without a "truncated"
    // marks terminal states only.
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
      const bool is_dummy = !options_.leaves_out_dummies && skipped_[static_cast<std::size_t>(p)];
      const std::int64_t t = steps_ - 1 - static_cast<std::int64_t>(is_dummy);
      if (t >= 0) {
        flag->fill(p, t, 1, 1);
      }
    }
  }
}

// Clears the cells after the end of the rollout.
void Recorder::State::clear_after_end() {
  const std::int64_t left = slab_->placement().geometry().steps - steps_;
  for (std::int64_t p = 0; left > 0 && p < options_.envs; ++p) {
    for (const LeafRows* leaf : leaves_.all) {
      leaf->fill(p, steps_, left, 0);
    }
    leaves_.ids.fill(p, steps_, left, 0xFF);
  }
}

RolloutHeader Recorder::State::finish(const RolloutName& name, std::span<State* const> beside) {
  std::vector<State*> all{this};
  all.insert(all.end(), beside.begin(), beside.end());
  check_complete(all);
  RolloutHeader header;
  header.worker = name.worker;
  header.incarnation = name.incarnation;
  header.sequence = name.sequence;
  header.policy_version = policy_version_;
  header.generation = slab_->generation();
  for (State* recorder : all) {
    recorder->leaves_.flush();
    if (recorder->options_.set_truncated) {
      recorder->flag_last_frames();
    }
    recorder->clear_after_end();
    header.frames += recorder->collected_;
    header.policy_version = std::min(header.policy_version, recorder->policy_version_);
  }
  const std::vector<std::int64_t> lengths(static_cast<std::size_t>(options_.envs_of_worker()),
                                          steps_);
  write_header(slab_->data(), slab_->placement(), row_, header, lengths);
  header = read_header({slab_->data(), static_cast<std::size_t>(slab_->bytes())},
                       slab_->placement(), row_);
  stream_fence();
  for (State* recorder : all) {
    recorder->slab_.reset();
  }
  return header;
}

// Checks that these recorders cover all environments and that all their steps were recorded.
void Recorder::State::check_complete(std::vector<State*> all) const {
  std::ranges::sort(all, {}, [](const State* recorder) { return recorder->options_.first_env; });
  std::int64_t envs = 0;
  bool is_whole = true;  // each recorder begins where the previous one ends
  for (const State* recorder : all) {
    if (!recorder->slab_) {
      throw std::logic_error("finish: expected an open rollout; call begin() first");
    }
    if (recorder->steps_left() > 0) {
      throw std::logic_error("finish: expected a complete rollout, but " +
                             std::to_string(recorder->steps_left()) +
                             " steps are not recorded yet");
    }
    if (recorder->slab_ != slab_ || recorder->row_ != row_ || recorder->steps_ != steps_) {
      throw std::logic_error("finish: expected recorders of the same rollout");
    }
    is_whole = is_whole && recorder->options_.first_env == envs;
    envs += recorder->options_.envs;
  }
  if (!is_whole || envs != options_.envs_of_worker()) {
    throw std::logic_error("finish: expected recorders that have each of " +
                           std::to_string(options_.envs_of_worker()) + " envs once, got those of " +
                           std::to_string(envs));
  }
}

void Recorder::State::abandon() {
  if (slab_) {
    episodes_.resize(episodes_before_);  // their frames are discarded
    slab_.reset();
    // The memory of an observation that is not live has its value before the rollout.
    restarted_ = std::ranges::all_of(leaves_.observations, [](const auto& observation) {
      return observation.live || !observation.current;
    });
  }
}

std::vector<Episode> Recorder::State::take_episodes() {
  std::vector<Episode> taken = episodes_;
  episodes_.clear();
  episodes_before_ = 0;
  return taken;
}

Recorder::Recorder(Layout layout, const std::vector<ObservationSpec>& observations,
                   const std::vector<Key>& outputs, RecorderOptions options,
                   const std::vector<StateSpec>& states, const std::optional<TensorView>& is_init,
                   const std::optional<TensorView>& step_count, const std::vector<Key>& elsewhere)
    : state_(std::make_unique<State>(std::move(layout), observations, outputs, options, states,
                                     is_init, step_count, elsewhere)) {}

Recorder::~Recorder() = default;

void Recorder::restart(std::span<const ConstTensorView> observation) {
  owned().restart(observation);
}

void Recorder::begin(std::shared_ptr<Slab> slab, std::int64_t row, std::int64_t policy_version,
                     RolloutControl control, std::int64_t steps) {
  owned().begin(std::move(slab), row, policy_version, std::move(control), steps);
}

void Recorder::set_policy_version(std::int64_t version) { owned().set_policy_version(version); }

std::vector<Recorder::State*> Recorder::states_of(std::span<Recorder* const> recorders) {
  std::vector<State*> states;
  for (const Recorder* recorder : recorders) {
    states.push_back(recorder->state_.get());
  }
  return states;
}

bool Recorder::stop(std::span<Recorder* const> beside) { return owned().stop(states_of(beside)); }

RolloutHeader Recorder::finish(const RolloutName& name, std::span<Recorder* const> beside) {
  return owned().finish(name, states_of(beside));
}

void Recorder::abandon() { state_->abandon(); }

std::vector<Episode> Recorder::take_episodes() { return state_->take_episodes(); }

std::span<const std::uint8_t> Recorder::done() const { return state_->done(); }

std::span<const std::uint8_t> Recorder::behind() const { return state_->behind(); }

std::int64_t Recorder::steps_left() const { return state_->steps_left(); }

std::int64_t Recorder::frames() const { return state_->frames(); }

}  // namespace pycollect::inline PYCOLLECT_ABI
