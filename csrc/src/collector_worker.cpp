#include "collector_worker.h"

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace pycollect::inline PYCOLLECT_ABI::detail {
namespace {

std::vector<Leaf> joined(std::vector<Leaf> leaves, const std::vector<Leaf>& more) {
  leaves.insert(leaves.end(), more.begin(), more.end());
  return leaves;
}

// Derives a seed for each copy of a policy (splitmix64).
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
      layout_(standard_layout(environments_.observation_leaves(),
                              joined(environments_.action_leaves(), outputs))),
      outputs_(environments_.envs(), joined(environments_.action_leaves(), outputs)),
      chosen_(outputs_.views().begin(), outputs_.views().end()),
      actions_(environments_.action_leaves().size()) {
  if (environments_.envs() != options.envs) {
    throw std::invalid_argument("envs: expected " + std::to_string(options.envs) +
                                " environments per worker, got " +
                                std::to_string(environments_.envs()));
  }
  const std::span<const TensorView> observed = environments_.observations();
  std::vector<ObservationSpec> specs;
  for (std::size_t i = 0; i < observed.size(); ++i) {
    specs.push_back({environments_.observation_leaves()[i].key, observed[i]});
  }
  std::vector<Key> keys;
  for (const Leaf& leaf : joined(environments_.action_leaves(), outputs)) {
    keys.push_back(leaf.key);
  }
  RecorderOptions recording;
  recording.envs = options.envs;
  recording.batched = true;
  recording.max_frames_per_traj = options.max_frames_per_traj;
  recording.set_truncated = options.set_truncated;
  recorder_ = std::make_unique<Recorder>(layout_, specs, keys, recording);
}

void Worker::take(const std::shared_ptr<const Version>& version) {
  if (version_ != version) {
    roll_ = version->policy.make(mixed(options_.seed, index_, version->number));
    version_ = version;
  }
}

void Worker::reset_all() {
  environments_.reset_all();
  recorder_->restart(environments_.seen());
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
    const std::span<const ConstTensorView> chosen(chosen_);
    if (!roll_({environments_, *recorder_, outputs_.views(), chosen, chosen.first(actions_),
                stopping})) {
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
  const std::vector<Episode> ended = recorder_->take_episodes();
  std::vector<Batch::Episode> episodes;
  episodes.reserve(ended.size());
  for (const Episode& episode : ended) {
    episodes.push_back({index_, episode.env, episode.length, episode.total_reward});
  }
  return episodes;
}

}  // namespace pycollect::inline PYCOLLECT_ABI::detail
