// Assembling batches: copying rollouts into the rows of a batch, and making trajectory ids global.
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

// Copies the rollout of one worker (a slab of geometry workers 1, P, T) into `row` of the batch's
// slab at `base`, including its header. Returns that header. A rollout with fewer steps than the
// batch is padded: zeros, ("collector", "traj_ids") -1 and therefore ("collector", "mask") False.
//
// The rollout may come from another process and needs no alignment. Throws std::invalid_argument,
// before anything is written, if the bytes do not fit their placement or the placement does not fit
// the batch. Several threads may place rollouts into distinct rows at the same time. Costs one copy
// of the rollout.
RolloutHeader place_rollout(ThreadPool& pool, std::byte* base, const Placement& batch,
                            std::int64_t row, std::span<const std::byte> rollout,
                            const Placement& placement);

// Copies a whole batch of several workers into `row` of another batch as the rollout of one worker.
// A worker that runs several processes returns its rollouts this way.
//
// The workers become environments, [W, P, T] to [W * P, T], or are concatenated along time, [P, W,
// T] to [P, W * T]; the two geometries determine which. The new header takes its worker,
// incarnation, sequence and generation from `header`. It has the frames and valid lengths of all
// rollouts and their oldest policy version.
//
// Throws std::invalid_argument, before anything is written, if a header or the target does not fit.
// Costs one copy of the batch.
RolloutHeader join_rollouts(ThreadPool& pool, std::byte* base, const Placement& batch,
                            std::int64_t row, std::span<const std::byte> slab,
                            const Placement& placement, RolloutHeader header);

// Copies a batch whose rollouts ended early, [P, B, T], without the uncollected cells after its
// valid lengths. The target is a slab of one worker whose T is the sum of these lengths. Workers
// are concatenated along time, and every cell of the result was collected. Writes no header.
//
// Throws std::invalid_argument if a header does not fit, if the environments of one row have
// different lengths, or if the target has another size.
void compact(ThreadPool& pool, std::byte* target, const Placement& joined,
             std::span<const std::byte> slab, const Placement& batch);

// Maps the trajectory ids of workers to global ids, which are unique over all workers and the whole
// run. Global ids have no gaps and are given in the order in which trajectories are seen.
//
// A worker numbers the trajectories of each of its environments: ids >= 0 and below 2^62 that grow
// with time. All frames of a trajectory have the same id, also if it continues in the next rollout.
// Uncollected cells have -1. Not thread-safe.
class TrajectoryIds {
 public:
  // The part of the state that belongs to one worker: for each environment, the local and the
  // global id of its open trajectory, or -1 before its first one.
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
  // Continues from a saved state. Throws std::invalid_argument for a state that no run can produce.
  explicit TrajectoryIds(State state);

  // Properties of the ids that the caller guarantees.
  enum class Known : std::uint8_t {
    nothing,
    // Each id equals the previous id or is greater by one, as in a Recorder's rollout without
    // uncollected cells.
    counting,
  };

  // Replaces the ids of a rollout, [P, T] int64, by global ones, in place. New trajectories get
  // their ids by environment, then by time; -1 stays. Call it for one rollout of a batch after
  // another, in worker order.
  //
  // Throws std::invalid_argument, and changes nothing, if the ids are not as described above. If
  // `known` is `counting`, only the first id of each row is checked. Costs one pass to check and
  // one to write.
  void renumber(std::int64_t worker, const TensorView& ids, Known known = Known::nothing);

  // Numbers `count` new trajectories, whose ids the caller writes; returns the first of their ids.
  // Throws std::invalid_argument for a negative count, and if an id would not be below 2^62.
  std::int64_t issue(std::int64_t count);

  // Call this when a worker was replaced: its open trajectories end, and its local ids start again.
  void forget(std::int64_t worker) { state_.workers.erase(worker); }

  // The id of the next new trajectory, which is also the number of trajectories so far.
  std::int64_t next() const { return state_.next; }
  const State& state() const { return state_; }

 private:
  State state_;
};

}  // namespace pycollect::inline PYCOLLECT_ABI
