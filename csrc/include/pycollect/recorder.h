// Recorder: writes what P environments and their policy produce into a slab, step after step.
//
// The writes of a step go to their final place in the batch; trajectory ids, step counts, flags and
// episode statistics are kept here. step() and reset() allocate nothing, but for the list of
// episodes that ended: it grows geometrically, and keeps its room when it is taken.
//
// Not thread-safe: a recorder belongs to one worker. Several recorders, each on a thread of its
// own, may write distinct rows of one slab at once.
//
// All or nothing: a call that throws has recorded nothing. begin() then leaves no rollout open, and
// a step that was refused can be recorded anew.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pycollect/detail/recorder_leaves.h"
#include "pycollect/detail/shared_number.h"
#include "pycollect/header.h"
#include "pycollect/layout.h"
#include "pycollect/slab.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

// An episode that ended in the rollout: by the env or by max_frames_per_traj.
struct Episode {
  std::int64_t env = 0;     // among all of the worker's
  std::int64_t length = 0;  // in frames
  double total_reward = 0;
};

// What one step of the environments gave, each with a leading P where batched. The outputs are
// those that the policy chose the step's action with. Reward and flags are not looked at where they
// are among the observations. An observation or a state may be the very memory that was given as
// `current`, so that environments write where the policy reads: nothing is copied there then. It
// may not overlap that memory in any other way.
struct StepData {
  std::span<const TensorView> observation;  // the true successor, in the order of `observations`
  TensorView reward;
  TensorView terminated;
  TensorView truncated;
  std::span<const TensorView> outputs;      // in the order of `outputs`
  std::span<const TensorView> states = {};  // for the next step, in the order of `states`
};

// The same of one environment, whose reward and flags are plain numbers.
struct OneStep {
  std::span<const TensorView> observation;
  double reward = 0;
  bool terminated = false;
  bool truncated = false;
  std::span<const TensorView> outputs;
  std::span<const TensorView> states = {};
};

// Which rollout it is, as its header says: whose, and the how many-th.
struct RolloutName {
  std::int64_t worker = 0;
  std::int64_t incarnation = 0;  // of the worker: how many of its id were there before
  std::int64_t sequence = 0;
};

// What others may do to a rollout while it runs, and see of it. Each number may be null. Looking at
// them costs a step nothing that could be measured.
struct RolloutControl {
  // Once this has come to `number`, the rollout ends with the step that is being recorded, but not
  // before it has `min_steps`. It is short then: the header has its valid lengths, and the cells
  // behind them are uncollected (zeros, trajectory ids -1). Of recorders beside each other, see
  // Recorder::stop().
  SharedNumber stop = nullptr;
  std::uint64_t number = 0;
  std::int64_t min_steps = 1;
  SharedNumber steps = nullptr;  // counted up with each step

  bool is_stopped() const { return stop && stop->load(std::memory_order_acquire) >= number; }
  void count_step() const {
    if (steps) {
      steps->fetch_add(1, std::memory_order_relaxed);
    }
  }
};

class Recorder {
 public:
  // `outputs` are the keys of the policy's outputs. `is_init`, bool [P, 1] or [1], is the caller's
  // memory that says whether the next step is a trajectory's first; it is a leaf then. So does
  // `step_count`, int64, say how many steps its trajectory has had, where the layout has that leaf.
  // `elsewhere` are the keys of what others write into the slab, after finish(): the recorder only
  // clears their uncollected cells.
  // Throws std::invalid_argument, which names the leaf, where the layout lacks one that the
  // contract promises, or has one that nobody writes.
  Recorder(Layout layout, const std::vector<ObservationSpec>& observations,
           const std::vector<Key>& outputs, RecorderOptions options,
           const std::vector<StateSpec>& states = {},
           const std::optional<TensorView>& is_init = std::nullopt,
           const std::optional<TensorView>& step_count = std::nullopt,
           const std::vector<Key>& elsewhere = {});
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Every environment was reset: open trajectories just end, new ones begin at this observation.
  // Throws std::logic_error within a rollout.
  void restart(std::span<const TensorView> observation);

  // The next steps go to `row` of this slab, which the recorder holds until finish() or abandon().
  // The rollout has `steps` of them, or as many as the slab where that is 0. Where it has fewer,
  // the cells behind its end are uncollected, as behind that of a rollout that was stopped.
  // Throws std::logic_error before restart() and where a rollout is open, std::invalid_argument for
  // no slab, one of another layout or number of environments, or too many steps, and
  // std::out_of_range for a row that the slab has not.
  void begin(std::shared_ptr<Slab> slab, std::int64_t row, std::int64_t policy_version,
             RolloutControl control = {}, std::int64_t steps = 0);

  // The frames from the next step on were acted by that version of the policy; the header keeps
  // that of the first frame, which is the oldest.
  void set_policy_version(std::int64_t version);

  // Where the rollout is of some of the worker's environments, and `beside` are the recorders of
  // the others: if it was stopped, it ends for all of them one step behind what the one that has
  // come furthest has. Returns whether it was so.
  bool stop(std::span<Recorder* const> beside);

  // Records a step and returns how many environments must be reset now (see done()); -1 minus that
  // number if the rollout was stopped and ends here. Throws std::logic_error where no step is left,
  // or where an environment was not reset that had to be, and std::invalid_argument, which names
  // the leaf, for an array that does not fit.
  std::int64_t step(const StepData& data);
  // The same. Throws std::logic_error also where there are several environments.
  std::int64_t step(const OneStep& data);

  // Where dummies are left out, steps are recorded of the environments that are behind() alone,
  // each at a step of its own; those of others mean nothing. An environment that ended by itself is
  // then not done(): what its next step shows is where its next trajectory begins.

  // The environments that done() names were reset: only their rows are read.
  void reset(std::span<const TensorView> observation);

  // After step(): one byte per env, 1 where it must be reset.
  std::span<const std::uint8_t> done() const { return done_; }
  // One byte per env, 1 where the rollout lacks frames of it; of use where dummies are left out.
  std::span<const std::uint8_t> behind() const { return apart_.behind; }

  // Completes the rollout and lets the slab go; the header stands in the slab too. Where it is of
  // some of the worker's environments, `beside` are the recorders of the others, which let it go,
  // too. Throws std::logic_error before the last step of any.
  RolloutHeader finish(const RolloutName& name = {}, std::span<Recorder* const> beside = {});

  // Lets the slab go, its rollout unfinished (an environment raised), and forgets the rollout's
  // episodes. Nothing happens after finish().
  void abandon();

  // How many steps the rollout needs at least.
  std::int64_t steps_left() const { return slab_ ? steps_ - step_ : 0; }
  // Steps of single environments recorded since construction, dummies not counted.
  std::int64_t frames() const { return frames_; }
  // Episodes that ended since the last call.
  std::vector<Episode> take_episodes();

 private:
  // The trajectory that each env is in, as arrays that are stored like any other.
  struct Trajectories {
    std::vector<std::int64_t> ids;      // local, each grows by one with each trajectory
    std::vector<std::int64_t> lengths;  // frames so far
    std::vector<double> returns;        // their rewards, added up
  };

  // Environments that are not at the same step, since their dummies are left out.
  struct Apart {
    std::vector<std::int64_t> at;       // frames that the rollout has of each
    std::vector<std::uint8_t> records;  // is this step a frame of it
    std::vector<std::uint8_t> behind;
    std::vector<std::uint8_t> cut;  // was it this recorder that ended its trajectory
  };

  std::int64_t record(std::span<const TensorView> observation, std::span<const TensorView> outputs,
                      std::span<const TensorView> states);
  void check_step_is_due() const;
  void check_observation(std::span<const TensorView> observation, bool stepped);
  void check_outputs(std::span<const TensorView> outputs);
  void check_states(std::span<const TensorView> states);
  void choose_envs();
  std::int64_t reached() const;
  bool is_recorded(std::size_t env) const {
    return !options_.leaves_out_dummies || apart_.records[env];
  }
  // The step of the rollout that an env comes to next.
  std::int64_t step_of(std::int64_t env) const {
    return options_.leaves_out_dummies ? apart_.at[static_cast<std::size_t>(env)] : step_;
  }
  void write_ahead(LeafRows& leaf, std::int64_t ahead, const TensorView& value, Fit fit) const;
  void write_now(LeafRows& current, const TensorView& value, Fit fit) const;
  template <typename T>
  void put_numbers(LeafRows& leaf, const std::vector<T>& values) const;
  void write_outputs(std::span<const TensorView> outputs);
  void write_observations(std::span<const TensorView> observation);
  void write_states(std::span<const TensorView> states);
  void count_frames();
  void complete_flags();
  void cut_trajectories();
  void end_episodes();
  void end_episode(std::int64_t env);
  void drop_dummies();
  void advance();
  void start_at(const std::vector<std::uint8_t>& envs, std::span<const TensorView> observation);
  void start_trajectory(std::int64_t env, std::int64_t step);
  void write_constants();
  void write_first_roots();
  std::int64_t all_envs() const {
    return options_.all_envs == 0 ? options_.envs : options_.all_envs;
  }
  bool is_alone() const { return all_envs() == options_.envs; }
  std::int64_t most_steps() const;
  void check_complete(const std::vector<Recorder*>& all) const;
  void flag_last_frames();
  bool is_stopped(std::int64_t reached) const;
  void clear_after_end();

  Layout layout_;
  RecorderOptions options_;
  RecorderLeaves leaves_;

  // How the arrays fit that are being recorded.
  std::vector<Fit> observation_fits_, output_fits_, state_fits_;
  // A number or a flag of each env.
  Trajectories open_;
  std::vector<double> rewards_;
  std::vector<float> reward_row_;  // the same as it is stored
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
};

}  // namespace pycollect::inline PYCOLLECT_ABI
