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

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "pycollect/detail/process.h"
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
  std::span<const ConstTensorView>
      observation;  // the true successor, in the order of `observations`
  ConstTensorView reward;
  ConstTensorView terminated;
  ConstTensorView truncated;
  std::span<const ConstTensorView> outputs;      // in the order of `outputs`
  std::span<const ConstTensorView> states = {};  // for the next step, in the order of `states`
};

// The same of one environment, whose reward and flags are plain numbers.
struct OneStep {
  std::span<const ConstTensorView> observation;
  double reward = 0;
  bool terminated = false;
  bool truncated = false;
  std::span<const ConstTensorView> outputs;
  std::span<const ConstTensorView> states = {};
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
  using Number = std::shared_ptr<std::atomic<std::uint64_t>>;

  // Once this has come to `number`, the rollout ends with the step that is being recorded, but not
  // before it has `min_steps`. It is short then: the header has its valid lengths, and the cells
  // behind them are uncollected (zeros, trajectory ids -1). Of recorders beside each other, see
  // Recorder::stop().
  Number stop = nullptr;
  std::uint64_t number = 0;
  std::int64_t min_steps = 1;
  Number steps = nullptr;  // counted up with each step

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
  ~Recorder();

  // Every environment was reset: open trajectories just end, new ones begin at this observation.
  // Throws std::logic_error within a rollout.
  void restart(std::span<const ConstTensorView> observation);

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
  void reset(std::span<const ConstTensorView> observation);

  // After step(): one byte per env, 1 where it must be reset.
  std::span<const std::uint8_t> done() const;
  // One byte per env, 1 where the rollout lacks frames of it; of use where dummies are left out.
  std::span<const std::uint8_t> behind() const;

  // Completes the rollout and lets the slab go; the header stands in the slab too. Where it is of
  // some of the worker's environments, `beside` are the recorders of the others, which let it go,
  // too. Throws std::logic_error before the last step of any.
  RolloutHeader finish(const RolloutName& name = {}, std::span<Recorder* const> beside = {});

  // Lets the slab go, its rollout unfinished (an environment raised), and forgets the rollout's
  // episodes. Nothing happens after finish().
  void abandon();

  // How many steps the rollout needs at least.
  std::int64_t steps_left() const;
  // Steps of single environments recorded since construction, dummies not counted.
  std::int64_t frames() const;
  // Episodes that ended since the last call.
  std::vector<Episode> take_episodes();

 private:
  friend class detail::SteppedEnvs;
  class State;

  // What step_again() records from now on: views that stay where and as they are, of memory that
  // stays. They are looked at here, and not with each step. step_again() throws std::logic_error
  // where nothing is to be repeated.
  void repeat(const StepData& data);
  std::int64_t step_again();
  static std::vector<State*> states_of(std::span<Recorder* const> recorders);
  // The state, to write into a slab. Throws std::runtime_error in the child of a fork.
  State& owned() {
    owner_.check();
    return *state_;
  }

  std::unique_ptr<State> state_;
  OwningProcess owner_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
