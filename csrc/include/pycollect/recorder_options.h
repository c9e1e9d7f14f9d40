// The description of the environments and the policy that a Recorder records.
#pragma once

#include <cstdint>

#include "pycollect/key.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

struct RecorderOptions {
  std::int64_t envs = 1;  // P
  // If several recorders share a worker's environments: the total number of environments (0: only
  // this recorder's), and the index of this recorder's first one. See Recorder::finish().
  std::int64_t all_envs = 0;
  std::int64_t first_env = 0;
  // Whether arrays have a leading dimension P even if P is 1. Arrays of several environments always
  // have it.
  bool batched = false;
  std::int64_t max_frames_per_traj = 0;  // truncate a trajectory at this length; 0: never
  // Whether the step after a done is a dummy step, whose cell stays uncollected. This is for
  // environments in NEXT_STEP mode that cannot be reset by mask. reset() is then never called.
  bool skips_after_done = false;
  // Whether a dummy step takes no cell; needs skips_after_done. An environment with dummy steps
  // then falls behind the others and has to be stepped without them at the end; see
  // Recorder::behind().
  bool leaves_out_dummies = false;
  // flag the last collected frame of every environment in every rollout
  bool set_truncated = false;

  bool has_env_dimension() const { return batched || envs > 1; }
  std::int64_t envs_of_worker() const { return all_envs == 0 ? envs : all_envs; }
};

// The additional role of an observation. If some observations are an `end`, the environment defines
// its own reward and flags, with any keys and shapes. They are copied unchanged, and those in
// StepData are ignored. Otherwise the recorder writes reward and flags as leaves of its own.
enum class Meaning : std::uint8_t { none, end, reward };

// One observation of the environment, after each step and each reset.
//
// If it is carried, the leaf ("next", key) may be missing: the successor is then only at the root
// of the next step. The same key may occur twice, carried and not carried: the carried one writes
// the root, and the other one writes ("next", key), if this leaf exists, with its own shape and
// dtype. The root may also be one of the policy's outputs; the policy then writes its own version
// of the observation there, in its own form.
struct ObservationSpec {
  Key key;
  // Contiguous memory of the caller that outlives the recorder. It always holds the observation for
  // the next action, [P, *obs] if batched, otherwise [*obs]. Unused if not carried.
  TensorView current;
  // Whether `current` must be valid after every step, because the policy reads it. Otherwise it is
  // only valid between rollouts.
  bool live = true;
  // Whether the observation is also recorded at the root, where the action was chosen. False for
  // values that only a step produces, such as a reward: only ("next", key) exists.
  bool carried = true;
  // An episode ends if any value of an observation with Meaning::end is set. The reward of a step
  // is the sum of all values of observations with Meaning::reward.
  Meaning meaning = Meaning::none;
};

// A value that the policy passes to its own next call, such as a recurrent state. The policy reads
// `key` and writes ("next", key). If recorded, both are leaves, except that ("next", key) may be
// missing, and `key` may be one of the outputs.
struct StateSpec {
  Key key;
  TensorView current;  // as in ObservationSpec; always live
  // for the first step of a trajectory: one frame, or one per environment as in `current`
  ConstTensorView initial;
  bool recorded = true;  // if false, the state has no leaf and is only carried from step to step
};

}  // namespace pycollect::inline PYCOLLECT_ABI
