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

// One environment may answer with another width of the same kind of number (float64 where the
// space says float32): that is cast. A float where integers are promised is a mistake.
bool castable(DType from, DType to) {
  const auto rank = [](DType dtype) { return static_cast<int>(kind_of(dtype)); };
  return rank(from) <= rank(to);
}

[[noreturn]] void refuse(const Leaf& leaf, const Dims& expected, const TensorView& came) {
  throw std::invalid_argument(to_string(leaf.key) + ": expected " +
                              std::string(name_of(leaf.dtype)) + " of shape " +
                              to_string(expected) + ", got " + std::string(name_of(came.dtype)) +
                              " of shape " + to_string(came.shape));
}

template <typename T>
void put(std::byte* target, T value) {
  std::memcpy(target, &value, sizeof(value));
}

// n frames of `bytes` bytes each; small ones by fixed-size moves, which a loop of memcpy is not.
template <std::size_t bytes>
void scatter_small(std::byte* dst, std::int64_t dst_stride, const std::byte* src,
                   std::int64_t src_stride, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    std::memcpy(dst + i * dst_stride, src + i * src_stride, bytes);
  }
}

void scatter(std::byte* dst, std::int64_t dst_stride, const std::byte* src, std::int64_t src_stride,
             std::int64_t n, std::int64_t bytes) {
  switch (bytes) {
    case 1:
      return scatter_small<1>(dst, dst_stride, src, src_stride, n);
    case 4:
      return scatter_small<4>(dst, dst_stride, src, src_stride, n);
    case 8:
      return scatter_small<8>(dst, dst_stride, src, src_stride, n);
    case 16:
      return scatter_small<16>(dst, dst_stride, src, src_stride, n);
    default:
      for (std::int64_t i = 0; i < n; ++i) {
        copy_frame(dst + i * dst_stride, src + i * src_stride, static_cast<std::size_t>(bytes));
      }
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

Recorder::Recorder(Layout layout, std::vector<ObservationSpec> observations,
                   const std::vector<Key>& outputs, RecorderOptions options)
    : layout_(std::move(layout)),
      options_(options),
      reward_(target({"next", "reward"})),
      done_leaf_(target({"next", "done"})),
      terminated_(target({"next", "terminated"})),
      truncated_(target({"next", "truncated"})),
      ids_(target({"collector", "traj_ids"})) {
  if (options.envs < 1 || (!options.batched && options.envs != 1)) {
    throw std::invalid_argument("envs: expected 1 where not batched, else >= 1, got " +
                                std::to_string(options.envs));
  }
  for (ObservationSpec& spec : observations) {
    Target root = target(spec.key);
    Target current = root;
    current.base = spec.current.data;
    current.env = current.frame;
    const Dims shape = batch_shape(root.leaf.shape);
    if (spec.current.dtype != root.leaf.dtype || spec.current.shape != shape ||
        !spec.current.is_contiguous()) {
      refuse(root.leaf, shape, spec.current);
    }
    observations_.push_back(
        {std::move(root), target(next_of(spec.key)), std::move(current), spec.current, spec.live});
  }
  for (const Key& key : outputs) {
    outputs_.push_back(target(key));
  }
  for (const char* flag : {"done", "terminated", "truncated"}) {
    root_flags_.push_back(target({flag}));
  }
  add_optional({"step_count"}, step_counts_);
  add_optional({"next", "step_count"}, step_counts_);
  add_optional({"collector", "policy_version"}, versions_);
  add_optional({"collector", "mask"}, masks_);

  all_ = {&reward_, &done_leaf_, &terminated_, &truncated_, &ids_};
  for (Observation& observation : observations_) {
    all_.push_back(&observation.root);
    all_.push_back(&observation.next);
  }
  for (auto* group : {&outputs_, &root_flags_, &step_counts_, &versions_, &masks_}) {
    for (Target& target : *group) {
      all_.push_back(&target);
    }
  }
  if (all_.size() != layout_.size()) {
    throw std::invalid_argument("layout: expected " + std::to_string(all_.size()) +
                                " leaves that the recorder writes, got " +
                                std::to_string(layout_.size()));
  }

  const auto n = static_cast<std::size_t>(options.envs);
  envs_.resize(n);
  done_.resize(n);
  flags_.resize(2 * n);
  rewards_.resize(n);
}

Recorder::Target Recorder::target(const Key& key) const {
  const int index = layout_.find(key);
  if (index < 0) {
    throw std::invalid_argument("layout: expected a leaf " + to_string(key) + ", there is none");
  }
  const Leaf& leaf = layout_[static_cast<std::size_t>(index)];
  return {leaf, static_cast<std::size_t>(index), leaf.frame_bytes(), nullptr, 0};
}

void Recorder::add_optional(const Key& key, std::vector<Target>& targets) const {
  if (layout_.find(key) >= 0) {
    targets.push_back(target(key));
  }
}

Dims Recorder::batch_shape(const Dims& frame) const {
  Dims shape;
  if (options_.batched) {
    shape.push_back(options_.envs);
  }
  for (std::int64_t extent : frame) {
    shape.push_back(extent);
  }
  return shape;
}

void Recorder::restart(std::span<const TensorView> observation) {
  check_observation(observation);
  for (std::size_t i = 0; i < observations_.size(); ++i) {
    write(observations_[i].current, 0, observation[i]);
  }
  std::fill(done_.begin(), done_.end(), std::uint8_t{0});
  for (Env& env : envs_) {
    start_trajectory(env);
  }
  restarted_ = true;
}

void Recorder::begin(std::shared_ptr<Slab> slab, std::int64_t row, std::int64_t policy_version) {
  if (!restarted_) {
    throw std::logic_error("begin: expected restart() before the first rollout");
  }
  const Placement& placement = slab->placement();
  if (placement.layout().fingerprint() != layout_.fingerprint() ||
      placement.geometry().envs != options_.envs) {
    throw std::invalid_argument("slab: expected this recorder's layout and " +
                                std::to_string(options_.envs) + " envs, got another one");
  }
  slab_ = std::move(slab);
  row_ = row;
  steps_ = slab_->placement().geometry().steps;
  step_ = 0;
  collected_ = 0;
  policy_version_ = policy_version;
  for (Target* target : all_) {
    bind(*target, row);
  }
  for (Env& env : envs_) {
    env.last_collected = -1;
  }
  clear_root_flags();
  for (const Observation& observation : observations_) {
    write(observation.root, 0, observation.view);
  }
}

void Recorder::bind(Target& target, std::int64_t row) {
  const TensorView rows = slab_->rows(target.index, row);
  target.base = rows.data;
  target.env = rows.strides[0];
}

// An env that ended is reset before its next step, so the state acted on is never a done one.
void Recorder::clear_root_flags() {
  for (const Target& flag : root_flags_) {
    for (std::int64_t p = 0; p < options_.envs; ++p) {
      std::memset(flag.base + p * flag.env, 0, static_cast<std::size_t>(flag.frame * steps_));
    }
  }
}

void Recorder::write(const Target& target, std::int64_t step, const TensorView& source) const {
  const int lead = options_.batched ? 1 : 0;
  const Dims& frame = target.leaf.shape;
  const bool fits = source.rank() == frame.size() + lead &&
                    (lead == 0 || source.shape[0] == options_.envs) &&
                    std::equal(frame.begin(), frame.end(), source.shape.begin() + lead);
  if (!fits || !castable(source.dtype, target.leaf.dtype) ||
      source.device.kind != DeviceKind::cpu) {
    refuse(target.leaf, batch_shape(frame), source);
  }
  std::byte* dst = target.base + step * target.frame;
  if (source.dtype == target.leaf.dtype && source.is_contiguous()) {
    scatter(dst, target.env, source.data, target.frame, options_.envs, target.frame);
    return;
  }
  TensorView view = TensorView::contiguous(dst, target.leaf.dtype, source.shape);
  if (options_.batched) {
    view.strides[0] = target.env;
  }
  copy(view, source);
}

std::int64_t Recorder::step(const StepData& data) {
  if (!slab_ || step_ >= steps_) {
    throw std::logic_error("step: expected a rollout with steps left");
  }
  check_observation(data.observation);
  if (data.outputs.size() != outputs_.size()) {
    throw std::invalid_argument("outputs: expected " + std::to_string(outputs_.size()) +
                                " arrays, got " + std::to_string(data.outputs.size()));
  }
  const auto n = static_cast<std::size_t>(options_.envs);
  const std::span flags(flags_);
  read_flat("reward", data.reward, DType::float64, std::span(rewards_));
  read_flat("terminated", data.terminated, DType::boolean, flags.first(n));
  read_flat("truncated", data.truncated, DType::boolean, flags.last(n));

  const bool last = step_ + 1 == steps_;
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    if (data.outputs[i].dtype != outputs_[i].leaf.dtype) {
      refuse(outputs_[i].leaf, batch_shape(outputs_[i].leaf.shape), data.outputs[i]);
    }
    write(outputs_[i], step_, data.outputs[i]);
  }
  for (std::size_t i = 0; i < observations_.size(); ++i) {
    const Observation& observation = observations_[i];
    write(observation.next, step_, data.observation[i]);
    if (!last) {
      write(observation.root, step_ + 1, data.observation[i]);
    }
    if (last || observation.live) {
      write(observation.current, 0, data.observation[i]);
    }
  }
  for (std::int64_t p = 0; p < options_.envs; ++p) {
    const auto i = static_cast<std::size_t>(p);
    if (envs_[i].skip) {
      clear_cell(p, step_);
      done_[i] = 0;
      start_trajectory(envs_[i]);
    } else {
      collect(p, rewards_[i], flags[i] != 0, flags[n + i] != 0);
    }
  }
  ++step_;
  return std::count(done_.begin(), done_.end(), std::uint8_t{1});
}

void Recorder::collect(std::int64_t p, double reward, bool terminated, bool truncated) {
  Env& env = envs_[static_cast<std::size_t>(p)];
  const auto at = [&](const Target& target) {
    return target.base + p * target.env + step_ * target.frame;
  };
  put(at(ids_), env.trajectory);
  for (const Target& mask : masks_) {
    put(at(mask), std::uint8_t{1});
  }
  for (const Target& version : versions_) {
    put(at(version), policy_version_);
  }
  if (!step_counts_.empty()) {
    put(at(step_counts_[0]), env.length);
    put(at(step_counts_[1]), env.length + 1);
  }
  ++env.length;
  env.total_reward += reward;
  env.last_collected = step_;
  ++collected_;
  ++frames_;

  truncated = truncated || env.length == options_.max_frames_per_traj;
  const bool done = terminated || truncated;
  put(at(reward_), static_cast<float>(reward));
  put(at(terminated_), static_cast<std::uint8_t>(terminated));
  put(at(truncated_), static_cast<std::uint8_t>(truncated));
  put(at(done_leaf_), static_cast<std::uint8_t>(done));
  done_[static_cast<std::size_t>(p)] = done && !options_.skips_after_done;
  env.skip = done && options_.skips_after_done;
  if (done) {
    episodes_.push_back({p, env.length, env.total_reward});
  }
}

void Recorder::clear_cell(std::int64_t p, std::int64_t step) {
  for (const Target* target : all_) {
    std::memset(target->base + p * target->env + step * target->frame, 0,
                static_cast<std::size_t>(target->frame));
  }
  put(ids_.base + p * ids_.env + step * ids_.frame, std::int64_t{-1});
}

void Recorder::start_trajectory(Env& env) {
  ++env.trajectory;
  env.length = 0;
  env.total_reward = 0;
  env.skip = false;
}

void Recorder::reset(std::span<const TensorView> observation) {
  check_observation(observation);
  for (std::size_t i = 0; i < observations_.size(); ++i) {
    const Observation& target = observations_[i];
    const Dims& frame = target.root.leaf.shape;
    if (observation[i].shape != target.view.shape ||
        !castable(observation[i].dtype, target.root.leaf.dtype)) {
      refuse(target.root.leaf, target.view.shape, observation[i]);
    }
    for (std::int64_t p = 0; p < options_.envs; ++p) {
      if (done_[static_cast<std::size_t>(p)] == 0) {
        continue;
      }
      const TensorView source = env_view(observation[i], p);
      if (slab_ && step_ < steps_) {
        copy(TensorView::contiguous(
                 target.root.base + p * target.root.env + step_ * target.root.frame,
                 target.root.leaf.dtype, frame),
             source);
      }
      copy(env_view(target.view, p), source);
    }
  }
  for (std::size_t p = 0; p < envs_.size(); ++p) {
    if (done_[p] != 0) {
      start_trajectory(envs_[p]);
      done_[p] = 0;
    }
  }
}

TensorView Recorder::env_view(const TensorView& view, std::int64_t env) const {
  return options_.batched ? view[env] : view;
}

void Recorder::check_observation(std::span<const TensorView> observation) const {
  if (observation.size() != observations_.size()) {
    throw std::invalid_argument("observation: expected " + std::to_string(observations_.size()) +
                                " arrays, got " + std::to_string(observation.size()));
  }
}

void Recorder::flag_last_frames() {
  for (std::int64_t p = 0; p < options_.envs; ++p) {
    const std::int64_t t = envs_[static_cast<std::size_t>(p)].last_collected;
    if (t >= 0) {
      put(truncated_.base + p * truncated_.env + t * truncated_.frame, std::uint8_t{1});
      put(done_leaf_.base + p * done_leaf_.env + t * done_leaf_.frame, std::uint8_t{1});
    }
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
  abandon();
  return header;
}

void Recorder::abandon() { slab_.reset(); }

std::vector<Episode> Recorder::take_episodes() { return std::exchange(episodes_, {}); }

}  // namespace pycollect
