"""The state that a collector and its source share: counters, ids and limits of one stream."""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Mapping
from weakref import WeakSet

from tensordict import TensorDictBase

from pycollect._core import FairLock, SharedNumber, TrajectoryIds
from pycollect.checks import check_open
from pycollect.data.devices import CPU
from pycollect.data.frame import BatchLeaves
from pycollect.data.trajectory_queue import TrajectoryQueue
from pycollect.data.upload import Uploads
from pycollect.data.weights import PolicyVersion
from pycollect.driver.accounts import Ledger, Statistics
from pycollect.driver.background import end_all
from pycollect.driver.delivery import Batch, written_before
from pycollect.driver.options import StreamOptions
from pycollect.driver.state import CollectorState
from pycollect.errors import warn_user, without_frames
from pycollect.policy.device import PolicyStream

Part = tuple[Mapping[int, int], Mapping[int, int], TensorDictBase]
"""Part of a batch that is delivered later: frames and version by worker, and the frames."""


class ShutDownError(RuntimeError):
    """The collector was shut down before it could return the requested batch."""


class Flow:
    """Counters, ids and limits of one stream of batches.

    A collector and its source both write to it, so neither needs a reference to the other. A source
    never holds its collector, so a collector without references is freed at once.

    Attributes:
        moving: Lock of the thread that advances the stream.
        ids: Assigns trajectory ids that are unique over all workers.
        entropy: Root of the random streams of a resumed or seeded run.
        seeded: Whether the run was resumed or seeded.
        queue: Trajectories that wait for a batch of trajectories; ``None`` for batches of frames.
        cut_frames: Frames of trajectories in `queue` that were cut off.
        parts: Claimed batches that are delivered together later; until then they are in flight.
        unclaimed: A collected batch that the caller may not have received because of an interrupt.
        failing: Exception that is raised after all completed rollouts were delivered. Until then,
            no rollout is requested. `failing` and `failure` are copies; see :func:`without_frames`.
        failure: Exception that every later call raises.
        closed: Whether collection has stopped for good.
        released: Whether all resources are freed and frames in flight count as lost.
        collecting: Whether this thread is collecting rollouts. A call of the collector then comes
            from the environment or the policy.
        stop: 1 if rollouts in this process must end after their current step.
        written_before: Number of items that were already in the replay buffer.
        policy_stream: CUDA stream handling for a policy that is called in this process.
    """

    def __init__(self, options: StreamOptions) -> None:
        self.options = options
        self.moving = FairLock()
        self.ledger = Ledger()
        self.statistics = Statistics()
        self.uploads = Uploads()
        self.version = PolicyVersion(options.tracker)
        self.ids = TrajectoryIds()
        self.entropy = secrets.randbits(64)
        self.seeded = False
        self.queue = self._new_queue(0)
        self.cut_frames = 0
        self.parts: list[Part] = []
        self.unclaimed: Batch | None = None
        self.failing: Exception | None = None
        self.failure: BaseException | None = None
        self.closed = False
        self.released = False
        self.collecting = False
        self.stop = SharedNumber()
        self.policy_stream = PolicyStream(CPU)
        self.written_before = written_before(options)
        self._warned_of_bounds = False
        self._warned_of_dummies = False
        _flows.add(self)
        atexit.unregister(_stop)  # registered anew, so that it runs before Ray's
        atexit.register(_stop)

    def close(self) -> None:
        """Stop collecting; a rollout in this process ends after its current step."""
        self.closed = True
        self.stop.value = 1

    # Progress

    @property
    def has_ended(self) -> bool:
        """Whether all requested frames were collected and no batch remains to be delivered."""
        options, queue = self.options, self.queue
        if options.total_frames is None or self.frames_collected < options.total_frames:
            return False
        # A buffer takes any number of trajectories.
        least = options.trajectories if options.replay_buffer is None else 1
        return queue is None or queue.complete < least

    @property
    def more_needed(self) -> bool:
        """Whether the delivered frames and those in flight are fewer than the requested frames."""
        total = self.options.total_frames
        if total is None:
            return True
        return self.ledger.delivered + self.ledger.in_flight + self.cut_frames < total

    @property
    def is_random(self) -> bool:
        """Whether a rollout that is requested now takes random actions.

        Lost rollouts do not count, so `init_random_frames` is a number of collected frames. Items
        that were in the replay buffer before count.
        """
        frames = self.written_before + self.ledger.delivered + self.ledger.in_flight
        return frames < self.options.init_random_frames

    @property
    def frames_collected(self) -> int:
        """Number of frames that were delivered, wait in the queue, or were cut off there."""
        waiting = 0 if self.queue is None else sum(self.queue.held.values()) + self.cut_frames
        return self.ledger.delivered + waiting

    # Frames

    def claim(self) -> None:
        """Hand the collected batch over to the caller."""
        if self.unclaimed is not None:
            self.statistics.progress["stepped_frames"] += sum(self.unclaimed.frames_of.values())
            self.statistics.count_episodes(self.unclaimed.episodes)
            self.unclaimed = None

    def push(self, worker: int, rollout: TensorDictBase, source: int) -> int:
        """Append a rollout to its trajectories, as in `TrajectoryQueue.push`; count their ends."""
        queue, progress = self.queue, self.statistics.progress
        assert queue is not None
        ready, frames = queue.complete, queue.complete_frames
        lost = queue.push(worker, rollout, source)
        progress["completed_trajectories"] += queue.complete - ready
        progress["trajectory_completed_frames"] += queue.complete_frames - frames
        return lost

    def progress(self) -> dict[str, int]:
        """Return TorchRL's counters of progress, and the frames of open trajectories."""
        pending = 0 if self.queue is None or self.closed else self.queue.open_frames
        return {**self.statistics.progress, "trajectory_pending_frames": pending}

    def lags(self, versions: Mapping[int, int]) -> dict[int, int]:
        """Return by how many policy versions each worker's rollout is behind now."""
        return {worker: self.version.lag(version) for worker, version in versions.items()}

    def count_lag(self, lags: Mapping[int, int], frames_of: Mapping[int, int]) -> None:
        """Count delivered frames by their lag."""
        for worker, frames in frames_of.items():
            self.statistics.count_lag(lags[worker], frames)

    def exceeds_limit(self, lags: Mapping[int, int]) -> bool:
        """Whether a rollout is too old to be delivered, by `max_policy_lag`."""
        limit = self.options.max_policy_lag
        return limit is not None and any(lag > limit for lag in lags.values())

    def is_stale(self, versions: Mapping[int, int]) -> bool:
        """Whether a rollout is too old now."""
        return self.exceeds_limit(self.lags(versions))

    def take_parts(self) -> list[Part]:
        """Remove and return the parts that are about to be delivered."""
        taken, self.parts = self.parts, []
        return taken

    def drop(self, reason: str) -> None:
        """Count everything in flight as lost: rollouts, and trajectories that wait for delivery."""
        self.ledger.lose_in_flight(reason)
        self.unclaimed = None
        self.parts.clear()
        if self.queue is not None:
            self.queue.clear()

    def lose_worker(self, worker: int, frames: int, reason: str) -> None:
        """Count frames of a worker as lost, and cut off its open trajectories."""
        self.ledger.lose(worker, frames, reason)
        if self.queue is not None:
            self.ledger.lose(worker, self.queue.cut(worker), reason)

    def _new_queue(self, next_id: int) -> TrajectoryQueue | None:
        """Return an empty queue that numbers its trajectories from `next_id` on, or ``None``."""
        if not self.options.trajectories:
            return None
        flat = self.options.replay_buffer is not None
        form = "cat" if flat else self.options.form
        return TrajectoryQueue(self.options.trajectories, form, next_id)

    def resume(self, state: CollectorState, dropped: Mapping[int, int]) -> None:
        """Continue from the state of another run; frames in flight, `dropped`, are lost."""
        self.ledger.restore(state.ledger)
        for worker, frames in dropped.items():
            self.ledger.issue(worker, frames)
            self.ledger.lose(worker, frames, "load_state_dict")
        self.statistics.restore(
            self.ledger.delivered, state.batches, state.episodes, state.progress
        )
        self.ids = TrajectoryIds.from_state((state.trajectories, []))
        self.queue = self._new_queue(state.trajectories)
        self.cut_frames = 0
        self.entropy, self.seeded = state.entropy, True
        self.version.resume(state.policy_version)

    # Checks

    def check_not_collecting(self, name: str) -> None:
        """Raise RuntimeError if the environment or the policy makes this call within a rollout."""
        if self.collecting:
            raise RuntimeError(
                f"{name}: the environment or the policy cannot call this within a rollout; call it "
                "between two batches"
            )

    def check_open(self) -> None:
        """Raise if the stream cannot continue, because it was shut down or has failed."""
        check_open(self.closed)
        failure = self.failure or self.failing
        if failure is not None:
            raise without_frames(failure)

    def check_not_closed(self) -> None:
        """Raise if the collector was shut down, perhaps by another thread."""
        if self.closed:
            raise ShutDownError("the collector was shut down; create a new one to collect batches")

    def check_environment(self, leaves: BatchLeaves, bounded: bool) -> None:
        """Raise ValueError if an observation to cast is missing.

        Warn if a trajectory might never end, and about cells without a frame.
        """
        options = self.options
        if options.cast is not None:
            options.cast.check_keys(leaves)
        omits = options.drop_uncollected or options.split_trajs or options.trajectories
        if leaves.dummies and not (self._warned_of_dummies or omits):
            self._warned_of_dummies = True
            warn_user(
                "create_env_fn: this vector environment uses NEXT_STEP autoreset; its reset steps "
                "are not frames, so ('collector', 'mask') is False there. To leave them out, use "
                "drop_uncollected=True, or the autoreset mode SAME_STEP or DISABLED"
            )
        if self.queue is not None and not bounded and not self._warned_of_bounds:
            self._warned_of_bounds = True
            name = "trajs_per_batch" if options.trajs_per_batch else "replay_write_mode"
            warn_user(
                f"{name}: the environment has no known time limit, and each trajectory is kept in "
                "memory until it ends; set max_frames_per_traj to limit it"
            )


_EXIT_TIMEOUT = 5.0  # seconds; an environment may hang in a step

_flows: WeakSet[Flow] = WeakSet()


def _stop() -> None:
    """Stop threads that collect from these streams when the program ends."""
    flows = [flow for flow in _flows if flow.moving.is_own_process]
    if not flows:  # a fork
        return
    end_all()
    FairLock.keep_others_out()
    for flow in flows:
        if flow.moving.is_busy:
            flow.close()
    FairLock.await_others(_EXIT_TIMEOUT)
