// Recorder: writes what P environments and their policy produce into a slab, step after step.
//
// The writes of a step go to their final place in the batch; trajectory ids, step counts, flags and
// episode statistics are kept here. Not thread-safe: a recorder belongs to one worker. step() and
// reset() allocate nothing (but for a list of episodes that ended, which grows geometrically).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pycollect/header.h"
#include "pycollect/layout.h"
#include "pycollect/slab.h"

namespace pycollect {

struct RecorderOptions {
  std::int64_t envs = 1;                 // P
  bool batched = false;                  // arrays have a leading dimension P
  std::int64_t max_frames_per_traj = 0;  // truncate a trajectory at that length; 0: never
  // The step after a done is a dummy whose cell stays uncollected (an env in NEXT_STEP mode that
  // cannot be reset by mask); reset() is then never called.
  bool skips_after_done = false;
  bool set_truncated = false;  // flag the last collected frame of every env in every rollout
};

// A root key whose ("next", ...) twin is a leaf too.
struct ObservationSpec {
  Key key;
  // The caller's memory, contiguous, which outlives the recorder: always the observation that the
  // next action is chosen on, [P, *obs] where batched, else [*obs].
  TensorView current;
  // current has to be right after every step, because the policy reads it; else only between
  // rollouts.
  bool live = true;
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
  std::span<const TensorView> outputs;  // in the order of `outputs`
};

class Recorder {
 public:
  // `outputs` are the keys of the policy's outputs.
  // Throws std::invalid_argument where the layout lacks a leaf that the contract promises, or has
  // one that nobody writes.
  Recorder(Layout layout, std::vector<ObservationSpec> observations,
           const std::vector<Key>& outputs, RecorderOptions options);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Every environment was reset: open trajectories just end, new ones begin at this observation.
  void restart(std::span<const TensorView> observation);

  // The next steps go to `row` of this slab, which the recorder holds until finish() or abandon().
  void begin(std::shared_ptr<Slab> slab, std::int64_t row, std::int64_t policy_version);

  // Records a step and returns how many environments must be reset now (see done()).
  std::int64_t step(const StepData& data);

  // The environments that done() names were reset: only their rows are read.
  void reset(std::span<const TensorView> observation);

  // After step(): one byte per env, 1 where it must be reset.
  std::span<const std::uint8_t> done() const { return done_; }

  // Completes the rollout and lets the slab go; the header stands in the slab too.
  // Throws std::logic_error before the last step, and where the slab was lent anew meanwhile.
  RolloutHeader finish(std::int64_t worker, std::int64_t incarnation, std::int64_t sequence);

  // Lets the slab go, its rollout unfinished (an environment raised).
  void abandon();

  std::int64_t steps_left() const { return slab_ ? steps_ - step_ : 0; }
  // Steps of single environments recorded since construction, dummies not counted.
  std::int64_t frames() const { return frames_; }
  // Episodes that ended since the last call.
  std::vector<Episode> take_episodes();

 private:
  // Where a leaf's frames go in the slab at hand: frame (p, t) at base + p * env + t * frame.
  struct Target {
    Leaf leaf;
    std::size_t index = 0;
    std::int64_t frame = 0;
    std::byte* base = nullptr;
    std::int64_t env = 0;
  };
  struct Observation {
    Target root;
    Target next;
    Target current;
    TensorView view;  // of current
    bool live;
  };
  struct Env {
    std::int64_t trajectory = -1;  // local id, grows by one with each trajectory
    std::int64_t length = 0;       // frames of the open trajectory so far
    double total_reward = 0;
    std::int64_t last_collected = -1;  // its step in this rollout
    bool skip = false;                 // the next step is a dummy
  };

  Target target(const Key& key) const;
  void add_optional(const Key& key, std::vector<Target>& targets) const;
  void bind(Target& target, std::int64_t row);
  Dims batch_shape(const Dims& frame) const;
  void write(const Target& target, std::int64_t step, const TensorView& source) const;
  void clear_cell(std::int64_t env, std::int64_t step);
  void clear_root_flags();
  void collect(std::int64_t env, double reward, bool terminated, bool truncated);
  void start_trajectory(Env& env);
  void flag_last_frames();
  void check_observation(std::span<const TensorView> observation) const;
  TensorView env_view(const TensorView& view, std::int64_t env) const;

  Layout layout_;
  RecorderOptions options_;
  std::vector<Observation> observations_;
  std::vector<Target> outputs_;
  Target reward_, done_leaf_, terminated_, truncated_, ids_;
  std::vector<Target> root_flags_;
  std::vector<Target> step_counts_;  // none, or root and next
  std::vector<Target> versions_;     // none or one
  std::vector<Target> masks_;        // none or one
  std::vector<Target*> all_;         // every target above

  std::vector<Env> envs_;
  std::vector<std::uint8_t> done_;
  std::vector<std::uint8_t> flags_;  // terminated, then truncated, of each env
  std::vector<double> rewards_;
  std::vector<Episode> episodes_;

  std::shared_ptr<Slab> slab_;
  std::int64_t row_ = 0;
  std::int64_t steps_ = 0;
  std::int64_t step_ = 0;
  std::int64_t policy_version_ = 0;
  std::int64_t collected_ = 0;
  std::int64_t frames_ = 0;
  bool restarted_ = false;
};

}  // namespace pycollect
