// Recorder: writes what P environments and their policy produce into a slab, step after step.
//
// The writes of a step go to their final place in the batch; trajectory ids, step counts, flags and
// episode statistics are kept here. Not thread-safe: a recorder belongs to one worker. step() and
// reset() allocate nothing (but for a list of episodes that ended, which grows geometrically).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pycollect/header.h"
#include "pycollect/layout.h"
#include "pycollect/leaf_rows.h"
#include "pycollect/shared_number.h"
#include "pycollect/slab.h"

namespace pycollect {

struct RecorderOptions {
  std::int64_t envs = 1;                 // P
  bool batched = false;                  // arrays have a leading dimension P
  std::int64_t max_frames_per_traj = 0;  // truncate a trajectory at that length; 0: never
  // The step after a done is a dummy whose cell stays uncollected (an env in NEXT_STEP mode that
  // cannot be reset by mask); reset() is then never called.
  bool skips_after_done = false;
  // Reward and flags are among the observations, whatever their keys and shapes, and copied as they
  // are; those in StepData only say where episodes end. Else they are leaves of the recorder's.
  bool own_flags = false;
  bool set_truncated = false;  // flag the last collected frame of every env in every rollout
};

// What an environment shows of itself after each step, and after a reset. A carried one may lack
// the leaf ("next", key): its successor is then only the next step's root.
struct ObservationSpec {
  Key key;
  // The caller's memory, contiguous, which outlives the recorder: always the observation that the
  // next action is chosen on, [P, *obs] where batched, else [*obs]. Unused where not carried.
  TensorView current;
  // current has to be right after every step, because the policy reads it; else only between
  // rollouts.
  bool live = true;
  // The root has it too: what the action was chosen on. False for what only a step gives, such as
  // a reward: there is ("next", key) alone.
  bool carried = true;
};

// What a policy passes on to its own next call (a recurrent state): it reads `key` and writes
// ("next", key). Both are leaves; the latter may be missing.
struct StateSpec {
  Key key;
  TensorView current;  // as in ObservationSpec; live
  TensorView initial;  // at a trajectory's first step: one frame, or one per env as in current
};

// An episode that ended in the rollout: by the env or by max_frames_per_traj.
struct Episode {
  std::int64_t env = 0;
  std::int64_t length = 0;  // in frames
  double total_reward = 0;
};

// What one step of the environments gave, each with a leading P where batched. The outputs are
// those that the policy chose the step's action with.
struct StepData {
  std::span<const TensorView> observation;  // the true successor, in the order of `observations`
  TensorView reward;
  TensorView terminated;
  TensorView truncated;
  std::span<const TensorView> outputs;      // in the order of `outputs`
  std::span<const TensorView> states = {};  // for the next step, in the order of `states`
};

// What others may do to a rollout while it runs, and see of it. Each number may be null. Looking at
// them costs a step nothing that could be measured.
struct RolloutControl {
  // Once this has come to `number`, the rollout ends with the step that is being recorded, but not
  // before it has `min_steps`. It is short then: the header has its valid lengths, and the cells
  // behind them are uncollected (zeros, trajectory ids -1).
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
  // Throws std::invalid_argument where the layout lacks a leaf that the contract promises, or has
  // one that nobody writes.
  Recorder(Layout layout, const std::vector<ObservationSpec>& observations,
           const std::vector<Key>& outputs, RecorderOptions options,
           const std::vector<StateSpec>& states = {},
           const std::optional<TensorView>& is_init = std::nullopt,
           const std::optional<TensorView>& step_count = std::nullopt);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Every environment was reset: open trajectories just end, new ones begin at this observation.
  void restart(std::span<const TensorView> observation);

  // The next steps go to `row` of this slab, which the recorder holds until finish() or abandon().
  // The rollout has `steps` of them, or as many as the slab where that is 0. Where it has fewer,
  // the cells behind its end are uncollected, as behind that of a rollout that was stopped.
  void begin(std::shared_ptr<Slab> slab, std::int64_t row, std::int64_t policy_version,
             RolloutControl control = {}, std::int64_t steps = 0);

  // Records a step and returns how many environments must be reset now (see done()); -1 minus that
  // number if the rollout was stopped and ends here.
  std::int64_t step(const StepData& data);

  // The environments that done() names were reset: only their rows are read.
  void reset(std::span<const TensorView> observation);

  // After step(): one byte per env, 1 where it must be reset.
  std::span<const std::uint8_t> done() const { return done_; }

  // Completes the rollout and lets the slab go; the header stands in the slab too.
  // Throws std::logic_error before the last step.
  RolloutHeader finish(std::int64_t worker, std::int64_t incarnation, std::int64_t sequence);

  // Lets the slab go, its rollout unfinished (an environment raised), and forgets the rollout's
  // episodes. Nothing happens after finish().
  void abandon();

  std::int64_t steps_left() const { return slab_ ? steps_ - step_ : 0; }
  // Steps of single environments recorded since construction, dummies not counted.
  std::int64_t frames() const { return frames_; }
  // Episodes that ended since the last call.
  std::vector<Episode> take_episodes();

 private:
  struct Observation {
    std::optional<LeafRows> root;
    std::optional<LeafRows> next;
    std::optional<LeafRows> current;
    TensorView view;  // of current
    bool live;
  };
  struct State {
    LeafRows root;
    std::optional<LeafRows> next;
    LeafRows current;
    TensorView view;     // of current
    TensorView initial;  // of the shape of current
  };
  struct Standard {  // reward and flags of an environment that has one of each
    LeafRows reward, done, terminated, truncated;
    std::vector<LeafRows> root_flags;
  };
  struct IsInit {
    LeafRows root;
    LeafRows current;
    TensorView view;
  };
  struct Env {
    std::int64_t trajectory = -1;  // local id, grows by one with each trajectory
    std::int64_t length = 0;       // frames of the open trajectory so far
    double total_reward = 0;
    std::int64_t last_collected = -1;  // its step in this rollout
    bool skip = false;                 // the next step is a dummy
  };

  LeafRows rows(const Key& key) const;
  std::optional<LeafRows> rows_if_any(const Key& key) const;
  LeafRows bound(const Key& key, const TensorView& memory) const;
  void add_optional(const Key& key, std::vector<LeafRows>& group) const;
  void add(const ObservationSpec& spec);
  void add(const StateSpec& spec);
  void list_all();
  void write_observations(std::span<const TensorView> observation);
  void write_states(std::span<const TensorView> states);
  void set_is_init(std::int64_t env, std::int64_t step, bool first);
  void set_length(std::int64_t env, std::int64_t length);
  void clear_cell(std::int64_t env);
  void clear_root_flags();
  void collect(std::int64_t env, double reward, bool terminated, bool truncated);
  void start_trajectory(std::int64_t env, std::int64_t step);
  void flag_last_frames();
  bool is_stopped() const;
  void clear_after_end();

  Layout layout_;
  RecorderOptions options_;
  std::vector<Observation> observations_;
  std::vector<LeafRows> outputs_;
  std::vector<State> states_;
  std::optional<Standard> standard_;
  std::optional<IsInit> is_init_;
  LeafRows ids_;
  std::vector<LeafRows> step_counts_;  // none, or root and next
  std::optional<LeafRows> steps_had_;  // the caller's memory that is the next root step count
  std::vector<LeafRows> versions_;     // none or one
  std::vector<LeafRows> masks_;        // none or one
  std::vector<LeafRows*> all_;         // every leaf of the layout, each once

  std::vector<Env> envs_;
  std::vector<std::uint8_t> done_;
  std::vector<std::uint8_t> flags_;  // terminated, then truncated, of each env
  std::vector<double> rewards_;
  std::vector<Episode> episodes_;

  std::shared_ptr<Slab> slab_;
  std::int64_t row_ = 0;
  RolloutControl control_;
  std::int64_t steps_ = 0;  // of the rollout, which ends earlier once it was stopped
  std::int64_t step_ = 0;
  std::int64_t policy_version_ = 0;
  std::int64_t collected_ = 0;
  std::size_t episodes_before_ = 0;  // of episodes_, when the rollout began
  std::int64_t frames_ = 0;
  bool restarted_ = false;
};

}  // namespace pycollect
