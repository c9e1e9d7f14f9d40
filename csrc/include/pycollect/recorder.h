// Recorder: writes the steps of P environments and their policy into a slab.
//
// The data of a step goes directly to its final place in the batch. The recorder also computes
// trajectory ids, step counts, flags and episode statistics. step() and reset() allocate nothing,
// except for the list of ended episodes: it grows geometrically and keeps its capacity when it is
// taken.
//
// Order of use: restart(), then for each rollout begin(), as many calls of step() as it needs, and
// finish() or abandon(). Call reset() after each step() that ended an episode.
//
// Not thread-safe: a recorder belongs to one worker. Several recorders on different threads may
// write distinct rows of one slab at the same time.
//
// A call that throws has recorded nothing: begin() leaves no rollout open, and a refused step can
// be recorded again.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "pycollect/detail/owning_process.h"
#include "pycollect/header.h"
#include "pycollect/key.h"
#include "pycollect/layout.h"
#include "pycollect/recorder_options.h"
#include "pycollect/slab.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

namespace detail {
class SteppedEnvs;
}

// An episode that ended in the rollout, by the environment or by max_frames_per_traj.
struct Episode {
  std::int64_t env = 0;     // among all environments of the worker
  std::int64_t length = 0;  // in frames
  double total_reward = 0;  // of all objectives
  // Of each objective; empty if a frame's reward is one number.
  std::vector<double> objectives = {};
};

// The results of one step, each with a leading P if batched. The reward and the flags are ignored
// if some observations have them as their Meaning. If the leaf ("next", "reward") has a shape other
// than one number, the reward must have this shape.
//
// An observation or a state may be exactly the memory that was passed as `current`, so that
// environments write into the memory that the policy reads; it is not copied then. It must not
// overlap that memory in any other way.
struct StepData {
  std::span<const ConstTensorView>
      observation;  // the true successor, in the order of `observations`
  ConstTensorView reward;
  ConstTensorView terminated;
  ConstTensorView truncated;
  // the outputs that chose the step's action, in the order of `outputs`
  std::span<const ConstTensorView> outputs;
  std::span<const ConstTensorView> states = {};  // for the next step, in the order of `states`
};

// The step of a single environment, with reward and flags as plain numbers. For rewards of one
// number.
struct OneStep {
  std::span<const ConstTensorView> observation;
  double reward = 0;
  bool terminated = false;
  bool truncated = false;
  std::span<const ConstTensorView> outputs;
  std::span<const ConstTensorView> states = {};
};

// The identity of a rollout, for its header.
struct RolloutName {
  std::int64_t worker = 0;
  std::int64_t incarnation = 0;  // number of earlier workers with this id
  std::int64_t sequence = 0;
};

// Lets other threads or processes stop a rollout and follow its progress. Each number may be null.
// Checking them has no measurable cost per step.
struct RolloutControl {
  using Number = std::shared_ptr<std::atomic<std::uint64_t>>;

  // When `*stop` reaches `number`, the rollout ends with the step that is being recorded, but not
  // before it has `min_steps` steps. The rollout is then short: its header has the valid lengths,
  // and later cells are uncollected (zeros, trajectory ids -1). For several recorders of one
  // rollout, see Recorder::stop().
  Number stop = nullptr;
  std::uint64_t number = 0;
  std::int64_t min_steps = 1;
  Number steps = nullptr;  // incremented by each step

  bool is_stopped() const { return stop && stop->load(std::memory_order_acquire) >= number; }
  void count_step() const {
    if (steps) {
      steps->fetch_add(1, std::memory_order_relaxed);
    }
  }
};

class Recorder {
 public:
  // `outputs` are the keys of the policy's outputs. `is_init`, bool [P, 1] or [1], is memory of the
  // caller; the recorder sets it to whether the next step is the first of a trajectory, and records
  // it as a leaf. `step_count`, int64 [P, 1] or [1], is memory of the caller for the number of
  // steps so far in the current trajectory; the layout must have this leaf. The recorder counts
  // steps if the layout has the leaf "step_count" and no observation has that key. `elsewhere` are
  // the keys of leaves that other code writes into the slab after finish(); the recorder only
  // clears their uncollected cells.
  //
  // Throws std::invalid_argument, which names the leaf, if the layout lacks a leaf that the
  // contract requires, or has one that nothing writes.
  Recorder(Layout layout, const std::vector<ObservationSpec>& observations,
           const std::vector<Key>& outputs, RecorderOptions options,
           const std::vector<StateSpec>& states = {},
           const std::optional<TensorView>& is_init = std::nullopt,
           const std::optional<TensorView>& step_count = std::nullopt,
           const std::vector<Key>& elsewhere = {});
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder();

  // Starts new trajectories at this observation, after every environment was reset. Open
  // trajectories end without a flag. Throws std::logic_error during a rollout.
  void restart(std::span<const ConstTensorView> observation);

  // Starts a rollout: the next steps go to `row` of this slab. The recorder holds the slab until
  // finish() or abandon(). The rollout has `steps` steps, or as many as the slab if `steps` is 0.
  // If it has fewer than the slab, the remaining cells are uncollected, as after a stopped rollout.
  //
  // Throws std::logic_error before restart() or during a rollout; std::invalid_argument if the slab
  // is null, has another layout or number of environments, or has too few steps; std::out_of_range
  // if the slab has no such row.
  void begin(std::shared_ptr<Slab> slab, std::int64_t row, std::int64_t policy_version,
             RolloutControl control = {}, std::int64_t steps = 0);

  // Sets the policy version of the frames from the next step on. The header keeps the version of
  // the first frame, which is the oldest.
  void set_policy_version(std::int64_t version);

  // Ends a stopped rollout that several recorders write. The recorders of the worker's other
  // environments are `beside`. The rollout ends for all of them one step after the last step of the
  // most advanced recorder. Returns false, and changes nothing, if it was not stopped, has fewer
  // than min_steps steps then, or ends there anyway.
  bool stop(std::span<Recorder* const> beside);

  // Records a step and returns the number of environments that must be reset now (see done()). If
  // the rollout was stopped and ends here, returns -1 minus this number.
  //
  // Throws std::logic_error if no step is left or if an environment was not reset in time. Throws
  // std::invalid_argument, which names the leaf, if an array does not fit.
  std::int64_t step(const StepData& data);
  // Records a step of a single environment. Also throws std::logic_error if there are several
  // environments, or several rewards per step.
  std::int64_t step(const OneStep& data);

  // Records a step in which environments have reset themselves where their episodes ended
  // (autoreset SAME_STEP). `data.observation` is for the next action. `last` has the last
  // observations of the episodes, like `data.observation`; only rows that ended are read. It may be
  // empty if none ended. No environment has to be reset afterwards.
  //
  // Returns nullopt and records nothing if this is not possible: an array needs a cast or has gaps,
  // last observations are missing, or the rollout has more data than a plain step
  // (recorder_plain.cpp) or max_frames_per_traj. Call step() and reset() then.
  std::optional<std::int64_t> step_autoreset(const StepData& data,
                                             std::span<const ConstTensorView> last);

  // With leaves_out_dummies, step() records only the environments that are behind(), each at its
  // own position, and ignores the data of the others. An environment that ended by itself is then
  // not done(): its next step gives the first observation of its next trajectory.

  // Passes the observations after a reset of the environments in done(). Only their rows are read.
  void reset(std::span<const ConstTensorView> observation);

  // One byte per environment, valid after step(): 1 if it must be reset.
  std::span<const std::uint8_t> done() const;
  // One byte per environment: 1 if the rollout lacks frames of it. Useful with leaves_out_dummies.
  std::span<const std::uint8_t> behind() const;

  // Completes the rollout, writes its header into the slab, releases the slab and returns the
  // header. If the recorder has only some of the worker's environments, `beside` are the recorders
  // of the others, which release the slab as well. Throws std::logic_error if any of them has steps
  // left.
  RolloutHeader finish(const RolloutName& name = {}, std::span<Recorder* const> beside = {});

  // Releases the slab of an unfinished rollout, for example after an environment threw an
  // exception, and discards the rollout's episodes. If an observation is not live, begin() then
  // throws std::logic_error until restart(). Has no effect after finish().
  void abandon();

  // The minimum number of steps that the rollout still needs.
  std::int64_t steps_left() const;
  // The number of steps of single environments since construction, without dummy steps.
  std::int64_t frames() const;
  // Returns the episodes that ended since the last call.
  std::vector<Episode> take_episodes();

 private:
  friend class detail::SteppedEnvs;
  class State;

  // repeat() fixes the arrays that step_again() records. Their views and memory must not change.
  // They are checked once, in repeat(), and not at each step. step_again() throws std::logic_error
  // before repeat().
  void repeat(const StepData& data);
  std::int64_t step_again();
  static std::vector<State*> states_of(std::span<Recorder* const> recorders);
  // Returns the state for writing. Throws std::runtime_error in the child of a fork.
  State& owned() {
    owner_.check();
    return *state_;
  }

  std::unique_ptr<State> state_;
  OwningProcess owner_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
