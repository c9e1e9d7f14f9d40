#include "pycollect/recorder.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "pycollect/copy.h"

namespace pycollect {
namespace {

Key next_of(const Key& key) {
  Key next{"next"};
  next.insert(next.end(), key.begin(), key.end());
  return next;
}

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
                   const std::optional<TensorView>& step_count)
    : layout_(std::move(layout)), options_(options), ids_(rows({"collector", "traj_ids"})) {
  if (options.envs < 1 || (!options.batched && options.envs != 1)) {
    throw std::invalid_argument("envs: expected 1 where not batched, else >= 1, got " +
                                std::to_string(options.envs));
  }
  for (const ObservationSpec& spec : observations) {
    add(spec);
  }
  for (const Key& key : outputs) {
    outputs_.push_back(rows(key));
  }
  for (const StateSpec& spec : states) {
    add(spec);
  }
  if (!options.own_flags) {
    standard_ = Standard{rows({"next", "reward"}),
                         rows({"next", "done"}),
                         rows({"next", "terminated"}),
                         rows({"next", "truncated"}),
                         {rows({"done"}), rows({"terminated"}), rows({"truncated"})}};
  }
  if (is_init) {
    is_init_ = IsInit{rows({"is_init"}), bound({"is_init"}, *is_init), *is_init};
  }
  add_optional({"collector", "policy_version"}, versions_);
  add_optional({"collector", "mask"}, masks_);
  if (!options.own_flags) {
    add_optional({"step_count"}, step_counts_);
    add_optional({"next", "step_count"}, step_counts_);
  }
  if (step_count) {
    steps_had_ = bound({"step_count"}, *step_count);
  }
  list_all();

  const auto n = static_cast<std::size_t>(options.envs);
  envs_.resize(n);
  done_.resize(n);
  flags_.resize(2 * n);
  rewards_.resize(n);
}

LeafRows Recorder::rows(const Key& key) const {
  const int index = layout_.find(key);
  if (index < 0) {
    throw std::invalid_argument("layout: expected a leaf " + to_string(key) + ", there is none");
  }
  const auto i = static_cast<std::size_t>(index);
  return {layout_[i], i, options_.envs, options_.batched};
}

std::optional<LeafRows> Recorder::rows_if_any(const Key& key) const {
  if (layout_.find(key) < 0) {
    return std::nullopt;
  }
  return rows(key);
}

LeafRows Recorder::bound(const Key& key, const TensorView& memory) const {
  LeafRows result = rows(key);
  result.bind(memory);
  return result;
}

void Recorder::add_optional(const Key& key, std::vector<LeafRows>& group) const {
  if (layout_.find(key) >= 0) {
    group.push_back(rows(key));
  }
}

void Recorder::add(const ObservationSpec& spec) {
  if (!spec.carried) {
    observations_.push_back({std::nullopt, rows(next_of(spec.key)), std::nullopt, {}, false});
    return;
  }
  observations_.push_back({rows(spec.key), rows_if_any(next_of(spec.key)),
                           bound(spec.key, spec.current), spec.current, spec.live});
}

void Recorder::add(const StateSpec& spec) {
  LeafRows current = bound(spec.key, spec.current);
  TensorView initial = spec.initial;
  if (options_.batched && initial.shape == current.leaf().shape) {  // one frame for all envs
    Dims strides{0};
    for (std::int64_t stride : initial.strides) {
      strides.push_back(stride);
    }
    initial.shape = current.step_shape();
    initial.strides = strides;
  }
  current.check(initial, true);
  states_.push_back(
      {rows(spec.key), rows_if_any(next_of(spec.key)), std::move(current), spec.current, initial});
}

void Recorder::list_all() {
  all_ = {&ids_};
  for (Observation& observation : observations_) {
    for (std::optional<LeafRows>* leaf : {&observation.root, &observation.next}) {
      if (*leaf) {
        all_.push_back(&**leaf);
      }
    }
  }
  for (State& state : states_) {
    all_.push_back(&state.root);
    if (state.next) {
      all_.push_back(&*state.next);
    }
  }
  if (is_init_) {
    all_.push_back(&is_init_->root);
  }
  if (standard_) {
    for (LeafRows* leaf :
         {&standard_->reward, &standard_->done, &standard_->terminated, &standard_->truncated}) {
      all_.push_back(leaf);
    }
    for (LeafRows& flag : standard_->root_flags) {
      all_.push_back(&flag);
    }
  }
  for (auto* group : {&outputs_, &step_counts_, &versions_, &masks_}) {
    for (LeafRows& leaf : *group) {
      all_.push_back(&leaf);
    }
  }
  if (all_.size() != layout_.size()) {
    throw std::invalid_argument("layout: expected " + std::to_string(all_.size()) +
                                " leaves that the recorder writes, got " +
                                std::to_string(layout_.size()));
  }
}

void Recorder::restart(std::span<const TensorView> observation) {
  check_count("observation", observations_.size(), observation.size());
  for (std::size_t i = 0; i < observations_.size(); ++i) {
    if (observations_[i].current) {
      observations_[i].current->write(0, observation[i]);
    }
  }
  std::fill(done_.begin(), done_.end(), std::uint8_t{0});
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
  const Placement& placement = slab->placement();
  if (placement.layout().fingerprint() != layout_.fingerprint() ||
      placement.geometry().envs != options_.envs) {
    throw std::invalid_argument("slab: expected this recorder's layout and " +
                                std::to_string(options_.envs) + " envs, got another one");
  }
  const std::int64_t most = placement.geometry().steps;
  if (steps < 0 || steps > most) {
    throw std::invalid_argument("steps: expected 1 to " + std::to_string(most) +
                                ", which the slab has, or 0 for these, got " +
                                std::to_string(steps));
  }
  slab_ = std::move(slab);
  control_ = std::move(control);
  row_ = row;
  steps_ = steps == 0 ? most : steps;
  step_ = 0;
  collected_ = 0;
  episodes_before_ = episodes_.size();
  policy_version_ = policy_version;
  for (LeafRows* leaf : all_) {
    leaf->bind(*slab_, row);
  }
  for (Env& env : envs_) {
    env.last_collected = -1;
  }
  clear_root_flags();
  for (const Observation& observation : observations_) {
    if (observation.root) {
      observation.root->write(0, observation.view);
    }
  }
  for (const State& state : states_) {
    state.root.write(0, state.view);
  }
  if (is_init_) {
    is_init_->root.write(0, is_init_->view);
  }
}

// An env that ended is reset before its next step, so the state acted on is never a done one.
void Recorder::clear_root_flags() {
  if (!standard_) {
    return;
  }
  for (const LeafRows& flag : standard_->root_flags) {
    for (std::int64_t p = 0; p < options_.envs; ++p) {
      flag.fill(p, 0, steps_, 0);
    }
  }
}

std::int64_t Recorder::step(const StepData& data) {
  if (!slab_ || step_ >= steps_) {
    throw std::logic_error("step: expected a rollout with steps left");
  }
  check_count("observation", observations_.size(), data.observation.size());
  check_count("outputs", outputs_.size(), data.outputs.size());
  check_count("states", states_.size(), data.states.size());
  const auto n = static_cast<std::size_t>(options_.envs);
  const std::span flags(flags_);
  read_flat("reward", data.reward, DType::float64, std::span(rewards_));
  read_flat("terminated", data.terminated, DType::boolean, flags.first(n));
  read_flat("truncated", data.truncated, DType::boolean, flags.last(n));

  const bool stopped = is_stopped();
  if (stopped) {
    steps_ = step_ + 1;  // all that is written or not because of a rollout's end follows
  }
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    outputs_[i].check(data.outputs[i], true);
    outputs_[i].write(step_, data.outputs[i]);
  }
  write_observations(data.observation);
  write_states(data.states);
  for (std::int64_t p = 0; p < options_.envs; ++p) {
    const auto i = static_cast<std::size_t>(p);
    set_is_init(p, step_ + 1, false);
    if (envs_[i].skip) {
      clear_cell(p);
      done_[i] = 0;
      start_trajectory(p, step_ + 1);
    } else {
      collect(p, rewards_[i], flags[i] != 0, flags[n + i] != 0);
    }
  }
  ++step_;
  control_.count_step();
  const std::int64_t resets = std::count(done_.begin(), done_.end(), std::uint8_t{1});
  return stopped ? -1 - resets : resets;
}

bool Recorder::is_stopped() const {
  return step_ + 1 >= control_.min_steps && step_ + 1 < steps_ && control_.is_stopped();
}

void Recorder::write_observations(std::span<const TensorView> values) {
  const bool last = step_ + 1 == steps_;
  for (std::size_t i = 0; i < observations_.size(); ++i) {
    const Observation& observation = observations_[i];
    if (observation.next) {
      observation.next->write(step_, values[i]);
    } else {
      observation.current->check(values[i]);
    }
    if (!observation.root) {
      continue;
    }
    if (!last) {
      observation.root->write(step_ + 1, values[i]);
    }
    if (last || observation.live) {
      observation.current->write(0, values[i]);
    }
  }
}

void Recorder::write_states(std::span<const TensorView> values) {
  for (std::size_t i = 0; i < states_.size(); ++i) {
    const State& state = states_[i];
    (state.next ? *state.next : state.current).check(values[i], true);
    state.current.write(0, values[i]);
    if (state.next) {
      state.next->write(step_, values[i]);
    }
    if (step_ + 1 < steps_) {
      state.root.write(step_ + 1, values[i]);
    }
  }
}

// Whether this step, the next to be chosen on, is the first of its trajectory.
void Recorder::set_is_init(std::int64_t p, std::int64_t step, bool first) {
  if (!is_init_) {
    return;
  }
  is_init_->current.put(p, 0, static_cast<std::uint8_t>(first));
  if (slab_ && step < steps_) {
    is_init_->root.put(p, step, static_cast<std::uint8_t>(first));
  }
}

void Recorder::set_length(std::int64_t p, std::int64_t length) {
  envs_[static_cast<std::size_t>(p)].length = length;
  if (steps_had_) {
    steps_had_->put(p, 0, length);
  }
}

void Recorder::collect(std::int64_t p, double reward, bool terminated, bool truncated) {
  Env& env = envs_[static_cast<std::size_t>(p)];
  ids_.put(p, step_, env.trajectory);
  for (const LeafRows& mask : masks_) {
    mask.put(p, step_, std::uint8_t{1});
  }
  for (const LeafRows& version : versions_) {
    version.put(p, step_, policy_version_);
  }
  if (!step_counts_.empty()) {
    step_counts_[0].put(p, step_, env.length);
    step_counts_[1].put(p, step_, env.length + 1);
  }
  set_length(p, env.length + 1);
  env.total_reward += reward;
  env.last_collected = step_;
  ++collected_;
  ++frames_;

  truncated = truncated || env.length == options_.max_frames_per_traj;
  const bool done = terminated || truncated;
  if (standard_) {
    standard_->reward.put(p, step_, static_cast<float>(reward));
    standard_->terminated.put(p, step_, static_cast<std::uint8_t>(terminated));
    standard_->truncated.put(p, step_, static_cast<std::uint8_t>(truncated));
    standard_->done.put(p, step_, static_cast<std::uint8_t>(done));
  }
  done_[static_cast<std::size_t>(p)] = done && !options_.skips_after_done;
  env.skip = done && options_.skips_after_done;
  if (done) {
    episodes_.push_back({p, env.length, env.total_reward});
  }
}

void Recorder::clear_cell(std::int64_t p) {
  for (const LeafRows* leaf : all_) {
    leaf->fill(p, step_, 1, 0);
  }
  ids_.put(p, step_, std::int64_t{-1});
}

// A trajectory whose first action is chosen at this step (of the rollout, if there is one).
void Recorder::start_trajectory(std::int64_t p, std::int64_t step) {
  Env& env = envs_[static_cast<std::size_t>(p)];
  ++env.trajectory;
  set_length(p, 0);
  env.total_reward = 0;
  env.skip = false;
  for (const State& state : states_) {
    state.current.write_env(p, 0, state.initial);
    if (slab_ && step < steps_) {
      state.root.write_env(p, step, state.initial);
    }
  }
  set_is_init(p, step, true);
}

void Recorder::reset(std::span<const TensorView> observation) {
  check_count("observation", observations_.size(), observation.size());
  for (std::size_t i = 0; i < observations_.size(); ++i) {
    const Observation& target = observations_[i];
    if (!target.root) {
      continue;
    }
    target.current->check(observation[i]);
    for (std::int64_t p = 0; p < options_.envs; ++p) {
      if (done_[static_cast<std::size_t>(p)] == 0) {
        continue;
      }
      if (slab_ && step_ < steps_) {
        target.root->write_env(p, step_, observation[i]);
      }
      target.current->write_env(p, 0, observation[i]);
    }
  }
  for (std::int64_t p = 0; p < options_.envs; ++p) {
    std::uint8_t& done = done_[static_cast<std::size_t>(p)];
    if (done != 0) {
      start_trajectory(p, step_);
      done = 0;
    }
  }
}

void Recorder::flag_last_frames() {
  std::vector<const LeafRows*> flags;
  if (standard_) {
    flags = {&standard_->done, &standard_->truncated};
  } else {
    for (const Observation& observation : observations_) {
      if (!observation.next) {
        continue;
      }
      const std::string& name = observation.next->leaf().key.back();
      if (name == "done" || name == "truncated") {
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
    for (const LeafRows* leaf : all_) {
      leaf->fill(p, steps_, left, 0);
    }
    ids_.fill(p, steps_, left, 0xFF);
  }
}

RolloutHeader Recorder::finish(std::int64_t worker, std::int64_t incarnation,
                               std::int64_t sequence) {
  if (!slab_ || step_ != steps_) {
    throw std::logic_error("finish: expected a rollout whose every step was recorded, " +
                           std::to_string(steps_left()) + " are left");
  }
  if (options_.set_truncated) {
    flag_last_frames();
  }
  clear_after_end();
  RolloutHeader header;
  header.worker = worker;
  header.incarnation = incarnation;
  header.sequence = sequence;
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

std::vector<Episode> Recorder::take_episodes() { return std::exchange(episodes_, {}); }

}  // namespace pycollect
