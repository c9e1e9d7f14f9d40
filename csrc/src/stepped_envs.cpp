#include "pycollect/detail/stepped_envs.h"

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace pycollect::inline PYCOLLECT_ABI::detail {
namespace {

std::int64_t checked_count(std::int64_t envs) {
  if (envs < 1) {
    throw std::invalid_argument("envs: expected at least 1 environment, got " +
                                std::to_string(envs));
  }
  return envs;
}

std::span<std::uint8_t> flags(const TensorView& view) {
  return {reinterpret_cast<std::uint8_t*>(view.data), static_cast<std::size_t>(view.shape[0])};
}

}  // namespace

SteppedEnvs::SteppedEnvs(std::unique_ptr<AnyEnvBatch> environments)
    : environments_(std::move(environments)),
      envs_(checked_count(environments_->envs())),
      observation_leaves_(environments_->observations()),
      action_leaves_(environments_->actions()),
      observations_(envs_, observation_leaves_),
      outcomes_(envs_, {{"reward", DType::float64, {}},
                        {"terminated", DType::boolean, {}},
                        {"truncated", DType::boolean, {}}}),
      seen_(observations().begin(), observations().end()),
      rewards_(reward().as<double>(), static_cast<std::size_t>(envs_)),
      terminated_(flags(terminated())),
      truncated_(flags(truncated())),
      data_{seen_, reward(), terminated(), truncated(), {}, {}} {}

void SteppedEnvs::reset_all() {
  const std::vector<std::uint8_t> all(static_cast<std::size_t>(envs_), 1);
  reset(all);
}

void SteppedEnvs::reset(std::span<const std::uint8_t> mask) {
  environments_->reset(mask, observations());
}

void SteppedEnvs::step(std::span<const ConstTensorView> actions) {
  environments_->step(actions, observations(), rewards_, terminated_, truncated_);
}

void SteppedEnvs::reset_done(Recorder& recorder) {
  reset(recorder.done());
  recorder.reset(seen_);
}

}  // namespace pycollect::inline PYCOLLECT_ABI::detail
