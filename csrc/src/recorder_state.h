// Recorder::State: the implementation of Recorder. recorder.cpp has the functions that run once per
// rollout, recorder_step.cpp those of each step, and recorder_plain.cpp the fast path of most
// steps.
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

// Public methods are documented in Recorder.
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
  std::optional<std::int64_t> step_autoreset(const StepData& data,
                                             std::span<const ConstTensorView> last);
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

  // Whether the last step of the rollout took the fast path. The path affects only the time.
  friend bool was_plain(const Recorder& recorder) {
    const State& state = of(recorder);
    return state.moves_.is_at(state.step_);
  }

 private:
  static const State& of(const Recorder& recorder) { return *recorder.state_; }

  // The open trajectory of each environment, in arrays that are recorded like any other.
  struct Trajectories {
    std::vector<std::int64_t> ids;      // local to the environment; incremented by each trajectory
    std::vector<std::int64_t> lengths;  // frames so far
    std::vector<double> returns;        // sums of their rewards, shaped as `rewards_`
  };

  // Positions of environments that are at different steps because their dummy steps are left out.
  struct Apart {
    std::vector<std::int64_t> at;       // frames in the rollout
    std::vector<std::uint8_t> records;  // whether this step is one of its frames
    std::vector<std::uint8_t> behind;
    std::vector<std::uint8_t> cut;  // whether max_frames_per_traj ended its trajectory
  };

  // Whether a step has one reward and one set of flags.
  bool is_one() const { return rewards_.size() == 1; }
  void read_rewards(const ConstTensorView& view);
  // Adds rewards_[first, end) to the returns, and casts them for the leaf.
  void add_rewards(std::size_t first, std::size_t end) {
    for (std::size_t i = first; i < end; ++i) {
      open_.returns[i] += rewards_[i];
      reward_row_[i] = static_cast<float>(rewards_[i]);
    }
  }
  bool may_be_plain() const;
  void plan_moves();
  std::int64_t record_many(const StepData& data);
  bool can_autoreset(const StepData& data) const;
  bool fit_observations(std::span<const ConstTensorView> values) const;
  void begin_after(std::span<const ConstTensorView> last);
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
  // The next step of an environment in the rollout.
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
  bool is_alone() const { return options_.envs_of_worker() == options_.envs; }
  std::int64_t most_steps() const;
  void check_complete(std::vector<State*> all) const;
  void flag_last_frames();
  bool is_stopped(std::int64_t reached) const {
    return control_.stop && is_alone() && reached >= control_.min_steps && reached < steps_ &&
           control_.is_stopped();
  }
  void clear_after_end();

  Layout layout_;
  RecorderOptions options_;
  RecorderLeaves leaves_;

  // How the arrays of the current step fit their leaves.
  std::vector<Fit> observation_fits_, output_fits_, state_fits_;
  // One number or flag per environment.
  Trajectories open_;
  std::size_t objectives_ = 1;     // numbers in the reward of one environment
  std::vector<double> rewards_;    // [envs, objectives]
  std::vector<float> reward_row_;  // rewards_ as they are recorded
  ConstTensorView reward_view_;    // a view of reward_row_
  std::vector<std::uint8_t> terminated_, truncated_, done_;
  std::vector<std::uint8_t> skips_, skipped_;  // whether the next or the last step is a dummy
  Apart apart_;
  std::int64_t resets_due_ = 0;
  std::vector<Episode> episodes_;

  std::shared_ptr<Slab> slab_;
  std::int64_t row_ = 0;
  RolloutControl control_;
  std::int64_t steps_ = 0;  // in the rollout; reduced when it is stopped
  std::int64_t step_ = 0;   // all environments have reached this step
  std::int64_t policy_version_ = 0;
  std::int64_t collected_ = 0;
  std::size_t episodes_before_ = 0;  // size of episodes_ at the start of the rollout
  std::int64_t frames_ = 0;
  bool restarted_ = false;
  // See recorder_plain.cpp.
  bool may_be_plain_ = false;
  bool has_live_ = false;  // whether each step writes the `current` of an observation
  StepMoves moves_;
  std::optional<StepData> repeated_;  // the arrays that step_again() records
  bool is_repeated_plain_ = false;    // so that step_again() need not check them
};

bool was_plain(const Recorder& recorder);

}  // namespace pycollect::inline PYCOLLECT_ABI
