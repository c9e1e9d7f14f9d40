#include "collector_worker.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace pycollect::inline PYCOLLECT_ABI::detail {
namespace {

std::vector<Leaf> joined(std::vector<Leaf> leaves, const std::vector<Leaf>& more) {
  leaves.insert(leaves.end(), more.begin(), more.end());
  return leaves;
}

// A seed for each copy of a policy (splitmix64).
std::uint64_t mixed(std::uint64_t seed, std::int64_t worker, std::int64_t version) {
  std::uint64_t x = seed + 0x9e3779b97f4a7c15ULL * (static_cast<std::uint64_t>(worker) + 1) +
                    0xd1b54a32d192ed03ULL * static_cast<std::uint64_t>(version);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

Worker::Worker(const CollectorOptions& options, std::int64_t index,
               std::unique_ptr<AnyEnvBatch> environments, const std::vector<Leaf>& outputs)
    : options_(options),
      index_(index),
      environments_(std::move(environments)),
      layout_(standard_layout(environments_->observations(),
                              joined(environments_->actions(), outputs))) {
  if (environments_->envs() != options.envs) {
    throw std::invalid_argument("envs: expected " + std::to_string(options.envs) +
                                " environments of each worker, got " +
                                std::to_string(environments_->envs()));
  }
  const std::vector<Leaf> observed = environments_->observations();
  const std::vector<Leaf> actions = environments_->actions();
  observations_ = room_for(observed);
  outputs_ = room_for(joined(actions, outputs));
  seen_.assign(observations_.begin(), observations_.end());
  actions_.assign(outputs_.begin(), outputs_.begin() + static_cast<std::ptrdiff_t>(actions.size()));
  reward_ = room(DType::float64, {options.envs});
  terminated_ = room(DType::boolean, {options.envs});
  truncated_ = room(DType::boolean, {options.envs});

  std::vector<ObservationSpec> specs;
  for (std::size_t i = 0; i < observed.size(); ++i) {
    specs.push_back({observed[i].key, observations_[i]});
  }
  std::vector<Key> keys;
  for (const Leaf& leaf : joined(actions, outputs)) {
    keys.push_back(leaf.key);
  }
  RecorderOptions recording;
  recording.envs = options.envs;
  recording.batched = true;
  recording.max_frames_per_traj = options.max_frames_per_traj;
  recording.set_truncated = options.set_truncated;
  recorder_ = std::make_unique<Recorder>(layout_, specs, keys, recording);
}

TensorView Worker::room(DType dtype, const Dims& shape) {
  TensorView view = TensorView::contiguous(nullptr, dtype, shape);
  memory_.push_back(Memory::allocate(view.bytes()));
  view.data = memory_.back()->data();
  std::memset(view.data, 0, static_cast<std::size_t>(view.bytes()));
  return view;
}

std::vector<TensorView> Worker::room_for(const std::vector<Leaf>& leaves) {
  std::vector<TensorView> views;
  for (const Leaf& leaf : leaves) {
    Dims shape{options_.envs};
    for (std::int64_t extent : leaf.shape) {
      shape.push_back(extent);
    }
    views.push_back(room(leaf.dtype, shape));
  }
  return views;
}

void Worker::take(const std::shared_ptr<const Version>& version) {
  if (version_ != version) {
    act_ = version->policy.make(mixed(options_.seed, index_, version->number));
    version_ = version;
  }
}

void Worker::reset_all() {
  const std::vector<std::uint8_t> all(static_cast<std::size_t>(options_.envs), 1);
  environments_->reset(all, observations_);
  recorder_->restart(observations_);
  running_ = true;
}

std::optional<std::vector<Batch::Episode>> Worker::collect(Order order,
                                                           const std::atomic<bool>& stopping) {
  try {
    take(order.version);
    if (!running_) {
      reset_all();
    }
    recorder_->begin(std::move(order.slab), order.row, order.version->number);
    if (!record(stopping)) {
      recorder_->abandon();
      running_ = false;
      return std::nullopt;
    }
  } catch (...) {
    recorder_->abandon();
    running_ = false;
    throw;
  }
  recorder_->finish({.worker = index_, .sequence = sequence_++});
  std::vector<Batch::Episode> episodes;
  for (const Episode& episode : recorder_->take_episodes()) {
    episodes.push_back({index_, episode.env, episode.length, episode.total_reward});
  }
  return episodes;
}

// Steps until the rollout's end; whether it came to that.
bool Worker::record(const std::atomic<bool>& stopping) {
  const auto envs = static_cast<std::size_t>(options_.envs);
  const std::span<double> rewards(reward_.as<double>(), envs);
  const std::span<std::uint8_t> terminated(reinterpret_cast<std::uint8_t*>(terminated_.data), envs);
  const std::span<std::uint8_t> truncated(reinterpret_cast<std::uint8_t*>(truncated_.data), envs);
  const StepData data{observations_, reward_, terminated_, truncated_, outputs_};
  while (recorder_->steps_left() > 0) {
    if (stopping.load(std::memory_order_relaxed)) {
      return false;
    }
    act_(seen_, outputs_);
    environments_->step(actions_, observations_, rewards, terminated, truncated);
    if (recorder_->step(data) > 0) {
      environments_->reset(recorder_->done(), observations_);
      recorder_->reset(observations_);
    }
  }
  return true;
}

}  // namespace pycollect::inline PYCOLLECT_ABI::detail
