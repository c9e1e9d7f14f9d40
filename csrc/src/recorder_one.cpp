// The step of one environment alone, as most loops have it: reward and flags are numbers, and the
// recorder keeps nothing of it but the trajectory. A step of many spreads what is decided for each
// array over its environments; here it is all that a step costs, so it is decided beforehand.
// What is written is what record() writes.
#include <cstdint>
#include <optional>
#include <span>

#include "recorder_state.h"

namespace pycollect::inline PYCOLLECT_ABI {

bool Recorder::State::is_plain_one() const {
  const bool keeps_more = leaves_.summary || leaves_.is_init || leaves_.step_count ||
                          leaves_.next_step_count || leaves_.steps_had || !leaves_.states.empty();
  return options_.envs == 1 && leaves_.standard && !keeps_more && !options_.skips_after_done;
}

// Whether the arrays are those of the leaves as they are. Others are left to record(), which casts
// or refuses them.
bool Recorder::State::fits_one(std::span<const ConstTensorView> observation,
                               std::span<const ConstTensorView> outputs,
                               std::span<const ConstTensorView> states) const {
  bool fits = observation.size() == leaves_.observations.size() &&
              outputs.size() == leaves_.outputs.size() && states.empty();
  const ConstTensorView* view = observation.data();
  for (auto own = leaves_.observations.begin(); fits && own != leaves_.observations.end(); ++own) {
    const std::optional<LeafRows>& leaf = own->written();
    fits = leaf && leaf->is_plain(*view++);
  }
  view = outputs.data();
  for (auto leaf = leaves_.outputs.begin(); fits && leaf != leaves_.outputs.end(); ++leaf) {
    fits = leaf->is_plain(*view++);
  }
  return fits;
}

std::int64_t Recorder::State::record_one(std::span<const ConstTensorView> observation,
                                         std::span<const ConstTensorView> outputs) {
  const bool stopped = is_stopped(step_ + 1);
  if (stopped) {
    steps_ = step_ + 1;
  }
  write_one(observation, outputs);
  const auto reward = static_cast<float>(rewards_[0]);
  leaves_.ids.put(0, step_, open_.ids[0]);
  leaves_.standard->reward.put(0, step_, reward);
  open_.returns[0] += rewards_[0];
  const bool is_cut = ++open_.lengths[0] == options_.max_frames_per_traj;
  ++collected_;
  ++frames_;
  truncated_[0] = static_cast<std::uint8_t>((truncated_[0] != 0) | is_cut);
  done_[0] = static_cast<std::uint8_t>((terminated_[0] | truncated_[0]) != 0);
  if (done_[0] != 0) {
    end_episode(0);
  }
  ++step_;
  control_.count_step();
  return stopped ? -1 - resets_due_ : resets_due_;
}

void Recorder::State::write_one(std::span<const ConstTensorView> observation,
                                std::span<const ConstTensorView> outputs) {
  const ConstTensorView* view = outputs.data();
  for (LeafRows& leaf : leaves_.outputs) {
    leaf.write(step_, *view++, Fit::plain);
  }
  const bool is_last = step_ + 1 == steps_;
  view = observation.data();
  for (RecorderLeaves::Observation& leaves : leaves_.observations) {
    const ConstTensorView& value = *view++;
    if (leaves.next) {
      leaves.next->write(step_, value, Fit::plain);
    }
    if (!leaves.current) {
      continue;
    }
    if (leaves.root && !is_last) {
      leaves.root->write(step_ + 1, value, Fit::plain);
    }
    if (is_last || leaves.live) {
      leaves.write_current(value, Fit::plain);
    }
  }
}

}  // namespace pycollect::inline PYCOLLECT_ABI
