// What a Recorder is told of the environments and the policy that it records.
#pragma once

#include <cstdint>

#include "pycollect/key.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

struct RecorderOptions {
  std::int64_t envs = 1;  // P
  // Where a worker's environments are recorded in groups, each by a recorder of its own: how many
  // there are in all (0: these are all), and which is the first here. See Recorder::finish().
  std::int64_t all_envs = 0;
  std::int64_t first_env = 0;
  // Arrays have a leading dimension P also where P is 1; those of several environments always have.
  bool batched = false;
  std::int64_t max_frames_per_traj = 0;  // truncate a trajectory at that length; 0: never
  // The step after a done is a dummy whose cell stays uncollected (an env in NEXT_STEP mode that
  // cannot be reset by mask); reset() is then never called.
  bool skips_after_done = false;
  // With skips_after_done: a dummy takes no cell. Its env falls behind the others, and has to be
  // stepped without them at the end; see Recorder::behind().
  bool leaves_out_dummies = false;
  bool set_truncated = false;  // flag the last collected frame of every env in every rollout

  bool has_env_dimension() const { return batched || envs > 1; }
};

// What an observation says besides. Where some say that an episode ends, reward and flags are the
// environment's own, whatever their keys and shapes: copied as they are, and those in StepData are
// not looked at. Else reward and flags are leaves of the recorder's.
enum class Meaning : std::uint8_t { none, end, reward };

// What an environment shows of itself after each step, and after a reset. A carried one may lack
// the leaf ("next", key): its successor is then only the next step's root. A carried one and one
// that is not may have the same key: the root is then written by the former, ("next", key) by the
// latter, with a shape and dtype of its own, if that is a leaf at all. The root may be one of
// the policy's outputs, which writes there what it made of the observation, in a form of its own.
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
  // An episode ends where any value of such an observation is set; the reward of a step is the sum
  // of all values of those.
  Meaning meaning = Meaning::none;
};

// What a policy passes on to its own next call (a recurrent state): it reads `key` and writes
// ("next", key). Both are leaves, where it is recorded; the latter may be missing, and the former
// one of its outputs.
struct StateSpec {
  Key key;
  TensorView current;       // as in ObservationSpec; live
  ConstTensorView initial;  // at a trajectory's first step: one frame, or one per env as in current
  bool recorded = true;     // false: no leaf has it, it is only carried from step to step
};

}  // namespace pycollect::inline PYCOLLECT_ABI
