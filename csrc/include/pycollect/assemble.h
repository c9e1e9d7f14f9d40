// assemble: rollouts become rows of a batch, and their local trajectory ids become global ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "pycollect/header.h"
#include "pycollect/layout.h"
#include "pycollect/tensor_view.h"
#include "pycollect/version.h"

namespace pycollect::inline PYCOLLECT_ABI {

class ThreadPool;

// Copies one worker's rollout (a slab of geometry workers 1, P, T) into `row` of a batch's slab
// that starts at `base`, header included, and returns that header. A rollout of fewer steps than
// the batch is padded: zeros, ("collector", "traj_ids") -1, and so ("collector", "mask") False.
// The rollout's bytes need no alignment.
//
// They may come from another process: throws std::invalid_argument, before anything is written,
// where they do not fit their placement, or it not the batch's. Safe to call at once for distinct
// rows. The cost is one copy of the rollout.
RolloutHeader place_rollout(ThreadPool& pool, std::byte* base, const Placement& batch,
                            std::int64_t row, std::span<const std::byte> rollout,
                            const Placement& placement);

// Copies a whole batch of several workers into `row` of another as the rollout of one: what a
// worker with processes of its own hands on. Workers become envs, [W, P, T] to [W * P, T], or
// follow each other along time, [P, W, T] to [P, W * T], whichever the geometries say. The new
// header has the frames and valid lengths of all of them, the oldest policy version, and of
// `header` the worker, incarnation, sequence and generation. Throws std::invalid_argument, before
// anything is written, where a header or the target does not fit. The cost is one copy of the
// batch.
RolloutHeader join_rollouts(ThreadPool& pool, std::byte* base, const Placement& batch,
                            std::int64_t row, std::span<const std::byte> slab,
                            const Placement& placement, RolloutHeader header);

// Copies a batch whose rollouts ended early, [P, B, T] with cells behind the valid lengths, into a
// slab of one worker whose T is the sum of these lengths: workers follow each other along time, and
// every cell is one that a worker came to. No header is written. Throws std::invalid_argument where
// a header does not fit, envs of one row have different lengths, or the target is another size.
void compact(ThreadPool& pool, std::byte* target, const Placement& joined,
             std::span<const std::byte> slab, const Placement& batch);

// Maps the trajectory ids of workers to ids that are unique over all workers and the whole run,
// without gaps, in the order in which they are seen.
//
// A worker numbers each of its envs on its own: ids >= 0 that grow with time, the same for all
// frames of a trajectory, also where it goes on in the next rollout, and -1 for an uncollected
// cell. Not thread-safe.
class TrajectoryIds {
 public:
  // What has to be kept to go on later: per worker and env, the open trajectory's local and global
  // id, -1 before the first.
  struct Worker {
    std::vector<std::int64_t> local;
    std::vector<std::int64_t> global;
    friend bool operator==(const Worker&, const Worker&) = default;
  };
  struct State {
    std::int64_t next = 0;
    std::map<std::int64_t, Worker> workers;
    friend bool operator==(const State&, const State&) = default;
  };

  TrajectoryIds() = default;
  // Throws std::invalid_argument for a state that no run can have come to.
  explicit TrajectoryIds(State state);

  // Renumbers a rollout's ids, [P, T] int64, in place: new trajectories by env, then by time. -1
  // stays. Calls for one batch go by worker. One pass to check, one to write; throws
  // std::invalid_argument, nothing changed, where ids are not as described above. Of those that are
  // known to count only the first of each row is checked.
  enum class Known : std::uint8_t {
    nothing,
    counting,  // each id is the one before or the next number: what a Recorder writes in a rollout
               // of no uncollected cell
  };
  void renumber(std::int64_t worker, const TensorView& ids, Known known = Known::nothing);

  // The worker was replaced: its open trajectories end, and its local ids begin anew.
  void forget(std::int64_t worker) { state_.workers.erase(worker); }

  // The id that the next new trajectory gets: the number of trajectories so far.
  std::int64_t next() const { return state_.next; }
  const State& state() const { return state_; }

 private:
  State state_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
