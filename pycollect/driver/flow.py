"""What a collector and its source share: the accounts of one stream of batches."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tensordict import TensorDictBase

from pycollect._core import SharedNumber, TrajectoryIds
from pycollect.checks import check_open
from pycollect.data.devices import CPU
from pycollect.data.frame import BatchLeaves
from pycollect.data.policy_stream import PolicyStream
from pycollect.data.trajectory_queue import TrajectoryQueue
from pycollect.data.upload import Uploads
from pycollect.data.weights import PolicyVersion
from pycollect.driver.accounts import Ledger, Statistics
from pycollect.driver.background import FairLock, stop_at_exit
from pycollect.driver.options import StreamOptions
from pycollect.driver.replay import written_before
from pycollect.driver.source import Batch
from pycollect.driver.state import CollectorState
from pycollect.errors import warn_user, without_frames

Part = tuple[Mapping[int, int], TensorDictBase]
"""A batch that is to be part of a larger one: frames of each worker, and these."""


class ShutDownError(RuntimeError):
    """The collector was shut down while, or before, a batch was asked for."""


class Flow:
    """What was asked for, what became of each frame, and where the stream stands.

    A collector and its source both write here, and neither has to know the other: a source never
    holds its collector, so that one that is forgotten is gone at once.

    Attributes:
        options: of the stream.
        moving: held by whoever moves the stream on.
        ids: by which trajectories are numbered over all workers.
        entropy, seeded: what the streams of a run come from that is resumed, or was seeded.
        queue: of trajectories, where batches are made of these; else None.
        cut_frames: of trajectories that were cut there.
        parts: claimed batches that are to be delivered as one, and are in flight until then.
        unclaimed: a batch that was collected and that an interrupt may have kept from the caller.
        failing: raised once completed rollouts were delivered; until then no rollout is requested.
            `failing` and `failure` are copies, see :func:`without_frames`.
        failure: raised by every later call.
        closed: nothing more is collected.
        released: All resources are freed, and frames in flight count as lost.
        collecting: Rollouts are being collected in this thread: a call of the collector can only
            come from the environment or the policy.
        stop: 1 if rollouts in this process are to end after their current step.
        policy_stream: of the device of a policy that is called in this process.
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
        self._written_before = written_before(options)
        self._warned_of_bounds = False
        self._warned_of_dummies = False
        stop_at_exit(self)

    def close(self) -> None:
        """Collect nothing more; a rollout in this process ends after its step."""
        self.closed = True
        self.stop.value = 1

    # How far it is

    @property
    def has_ended(self) -> bool:
        """Whether all that was asked for is there, and nothing is left to be delivered."""
        total = self.options.total_frames
        return total is not None and self._frames_here >= total and not self._has_more

    @property
    def more_needed(self) -> bool:
        """Whether what is delivered and in flight is less than what was asked for."""
        total = self.options.total_frames
        if total is None:
            return True
        return self.ledger.delivered + self.ledger.in_flight + self.cut_frames < total

    @property
    def is_random(self) -> bool:
        """Whether a rollout that is handed out now has random actions.

        Rollouts that were lost do not count: who asked for so many random frames gets them. What
        was in the replay buffer before counts.
        """
        there = self._written_before + self.ledger.delivered + self.ledger.in_flight
        return there < self.options.init_random_frames

    @property
    def _frames_here(self) -> int:
        """Frames that were collected and are not lost, or belonged to a trajectory that was cut."""
        waiting = 0 if self.queue is None else sum(self.queue.held.values()) + self.cut_frames
        return self.ledger.delivered + waiting

    @property
    def _leaves_dummies_out(self) -> bool:
        options = self.options
        return options.drop_uncollected or options.split_trajs or bool(options.trajs_per_batch)

    @property
    def _has_more(self) -> bool:
        """Whether a batch of trajectories is there already."""
        return self.queue is not None and self.queue.complete >= self.options.trajs_per_batch

    # What happens to frames

    def claim(self) -> None:
        """The batch that was collected is the caller's now."""
        if self.unclaimed is not None:
            self.statistics.count_episodes(self.unclaimed.episodes)
            self.unclaimed = None

    def take_parts(self) -> list[Part]:
        """They are about to be delivered."""
        taken, self.parts = self.parts, []
        return taken

    def drop(self, reason: str) -> None:
        """Whatever is in flight is lost: rollouts, and trajectories that wait to be delivered."""
        self.ledger.lose_in_flight(reason)
        self.unclaimed = None
        self.parts.clear()
        if self.queue is not None:
            self.queue.clear()

    def lose_worker(self, worker: int, frames: int, reason: str) -> None:
        """So many frames of a worker will not come, and its open trajectories end unfinished."""
        self.ledger.lose(worker, frames, reason)
        if self.queue is not None:
            self.ledger.lose(worker, self.queue.cut(worker), reason)

    def _new_queue(self, next_id: int) -> TrajectoryQueue | None:
        """An empty one whose trajectories are numbered from there on."""
        if not self.options.trajs_per_batch:
            return None
        flat = self.options.replay_buffer is not None
        form = "cat" if flat else self.options.form
        return TrajectoryQueue(self.options.trajs_per_batch, form, next_id)

    def resume(self, state: CollectorState, dropped: Mapping[int, int]) -> None:
        """Go on where another run stood.

        Args:
            dropped: frames of this one that were in flight, by worker, which are lost.
        """
        self.ledger.restore(state.ledger)
        for worker, frames in dropped.items():
            self.ledger.issue(worker, frames)
            self.ledger.lose(worker, frames, "load_state_dict")
        self.statistics.restore(self.ledger.delivered, state.batches, state.episodes)
        self.ids = TrajectoryIds.from_state((state.trajectories, []))
        self.queue = self._new_queue(state.trajectories)
        self.cut_frames = 0
        self.entropy, self.seeded = state.entropy, True
        self.version.number = state.policy_version

    # What may go on

    @contextmanager
    def between_rollouts(self, name: str) -> Iterator[None]:
        """Hold the stream, for a method of that name that changes it."""
        with self.moving:
            self.check_not_collecting(name)
            yield

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
        if self.options.cast is not None:
            self.options.cast.check_keys(leaves)
        if leaves.dummies and not (self._warned_of_dummies or self._leaves_dummies_out):
            self._warned_of_dummies = True
            warn_user(
                "create_env_fn: this vector environment uses NEXT_STEP autoreset; its reset steps "
                "are not frames, so ('collector', 'mask') is False there. To leave them out, use "
                "drop_uncollected=True, or the autoreset mode SAME_STEP or DISABLED"
            )
        if self.queue is not None and not bounded and not self._warned_of_bounds:
            self._warned_of_bounds = True
            warn_user(
                "trajs_per_batch: the environment has no known time limit, and each trajectory is "
                "kept in memory until it ends; set max_frames_per_traj to limit it"
            )
