// Recorder::State: what a Recorder is behind its pointer. recorder.cpp has what it does with each
// rollout, recorder_step.cpp what with each step, recorder_plain.cpp the short way of most steps.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "pycollect/detail/recorder_leaves.h"
#include "pycollect/recorder.h"
#include "step_moves.h"

namespace pycollect::inline PYCOLLECT_ABI {

// Methods are those of Recorder, which says what they do.
class Recorder::State {
 public:
  State(Layout layout, const std::vector<ObservationSpec>& observations,
        const std::vector<Key>& outputs, const RecorderOptions& options,
        const std::vector<StateSpec>& states, const std::optional<TensorView>& is_init,
        const std::optional<TensorView>& step_count, const std::vector<Key>& elsewhere);

  void restart(std::span<const ConstTensorView> observation);
  void begin(std::shared_ptr<Slab> slab, std::int64_t row, std::int64_t policy_version,
             RolloutControl control, std::int64_t steps);
  void set_policy_version(std::int64_t version);
  bool stop(std::span<State* const> beside);
  std::int64_t step(const StepData& data);
  std::int64_t step(const OneStep& data);
  void repeat(const StepData& data);
  std::int64_t step_again();
  void reset(std::span<const ConstTensorView> observation);
  RolloutHeader finish(const RolloutName& name, std::span<State* const> beside);
  void abandon();
  std::vector<Episode> take_episodes();

  std::span<const std::uint8_t> done() const { return done_; }
  std::span<const std::uint8_t> behind() const { return apart_.behind; }
  std::int64_t steps_left() const { return slab_ ? steps_ - step_ : 0; }
  std::int64_t frames() const { return frames_; }

  // Whether the rollout's last step took the short way; it shows in nothing else but time.
  friend bool was_plain(const Recorder& recorder) {
    const State& state = of(recorder);
    return state.moves_.is_at(state.step_);
  }

 private:
  static const State& of(const Recorder& recorder) { return *recorder.state_; }

  // The trajectory that each env is in, as arrays that are stored like any other.
  struct Trajectories {
    std::vector<std::int64_t> ids;      // local, each grows by one with each trajectory
    std::vector<std::int64_t> lengths;  // frames so far
    std::vector<double> returns;        // their rewards, added up; as `rewards_`
  };

  // Environments that are not at the same step, since their dummies are left out.
  struct Apart {
    std::vector<std::int64_t> at;       // frames that the rollout has of each
    std::vector<std::uint8_t> records;  // is this step a frame of it
    std::vector<std::uint8_t> behind;
    std::vector<std::uint8_t> cut;  // was it this recorder that ended its trajectory
  };

  // Whether a step is one reward and one set of flags.
  bool is_one() const { return rewards_.size() == 1; }
  void read_rewards(const ConstTensorView& view);
  // Adds these of rewards_ to the returns, and casts them for the leaf.
  void add_rewards(std::size_t first, std::size_t end) {
    for (std::size_t i = first; i < end; ++i) {
      open_.returns[i] += rewards_[i];
      reward_row_[i] = static_cast<float>(rewards_[i]);
    }
  }
  bool may_be_plain() const;
  void plan_moves();
  std::int64_t record_many(const StepData& data);
  template <bool known, typename Data, typename Numbers>
  std::int64_t record_one(const Data& data, const Numbers& numbers);
  template <typename Data, typename Numbers>
  std::int64_t record_any(const Data& data, const Numbers& numbers);
  template <bool known, typename Data>
  bool write_plain(const Data& data, bool stopped);
  void write_current(std::span<const ConstTensorView> observation, bool is_last);
  std::int64_t end_plain(std::int64_t frames, bool stopped) {
    collected_ += frames;
    frames_ += frames;
    ++step_;
    control_.count_step();
    return stopped ? -1 - resets_due_ : resets_due_;
  }
  std::int64_t record(std::span<const ConstTensorView> observation,
                      std::span<const ConstTensorView> outputs,
                      std::span<const ConstTensorView> states);
  void check_step_is_due() const {
    if (steps_left() <= 0 || resets_due_ > 0) {
      refuse_step();
    }
  }
  [[noreturn]] void refuse_step() const;
  void check_observation(std::span<const ConstTensorView> values, bool stepped);
  void check_outputs(std::span<const ConstTensorView> values);
  void check_states(std::span<const ConstTensorView> values);
  void choose_envs();
  std::int64_t reached() const;
  bool is_recorded(std::size_t env) const {
    return !options_.leaves_out_dummies || apart_.records[env];
  }
  // The step of the rollout that an env comes to next.
  std::int64_t step_of(std::int64_t env) const {
    return options_.leaves_out_dummies ? apart_.at[static_cast<std::size_t>(env)] : step_;
  }
  void write_ahead(LeafRows& leaf, std::int64_t ahead, const ConstTensorView& value, Fit fit) const;
  void write_now(LeafRows& current, const ConstTensorView& value, Fit fit) const;
  template <typename T>
  void put_numbers(LeafRows& leaf, const std::vector<T>& values) const;
  void write_outputs(std::span<const ConstTensorView> values);
  void write_observations(std::span<const ConstTensorView> values);
  void write_states(std::span<const ConstTensorView> values);
  void count_frames();
  void complete_flags();
  void cut_trajectories();
  void end_episodes();
  void end_done_episodes();
  void end_episode(std::int64_t p);
  void drop_dummies();
  void advance();
  void start_at(const std::vector<std::uint8_t>& envs,
                std::span<const ConstTensorView> observation);
  void start_trajectory(std::int64_t p, std::int64_t step);
  void write_constants();
  void write_first_roots();
  std::int64_t all_envs() const {
    return options_.all_envs == 0 ? options_.envs : options_.all_envs;
  }
  bool is_alone() const { return all_envs() == options_.envs; }
  std::int64_t most_steps() const;
  void check_complete(const std::vector<State*>& all) const;
  void flag_last_frames();
  bool is_stopped(std::int64_t reached) const {
    return control_.stop && is_alone() && reached >= control_.min_steps && reached < steps_ &&
           control_.is_stopped();
  }
  void clear_after_end();

  Layout layout_;
  RecorderOptions options_;
  RecorderLeaves leaves_;

  // How the arrays fit that are being recorded.
  std::vector<Fit> observation_fits_, output_fits_, state_fits_;
  // A number or a flag of each env.
  Trajectories open_;
  std::size_t objectives_ = 1;     // numbers of one env's reward
  std::vector<double> rewards_;    // [envs, objectives]
  std::vector<float> reward_row_;  // the same as it is stored
  ConstTensorView reward_view_;    // of reward_row_
  std::vector<std::uint8_t> terminated_, truncated_, done_;
  std::vector<std::uint8_t> skips_, skipped_;  // is the next step a dummy, was the last one
  Apart apart_;
  std::int64_t resets_due_ = 0;
  std::vector<Episode> episodes_;

  std::shared_ptr<Slab> slab_;
  std::int64_t row_ = 0;
  RolloutControl control_;
  std::int64_t steps_ = 0;  // of the rollout, which ends earlier once it was stopped
  std::int64_t step_ = 0;   // that all envs have come to
  std::int64_t policy_version_ = 0;
  std::int64_t collected_ = 0;
  std::size_t episodes_before_ = 0;  // of episodes_, when the rollout began
  std::int64_t frames_ = 0;
  bool restarted_ = false;
  // See recorder_plain.cpp.
  bool may_be_plain_ = false;
  bool has_live_ = false;  // is there an observation whose `current` each step writes
  StepMoves moves_;
  std::optional<StepData> repeated_;  // what step_again() records
  bool is_repeated_plain_ = false;    // so that nothing of it need be looked at
};

bool was_plain(const Recorder& recorder);

}  // namespace pycollect::inline PYCOLLECT_ABI
