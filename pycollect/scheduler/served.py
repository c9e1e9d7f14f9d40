"""Workers whose policy is called for them: its weights where that is here, its random stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pycollect.scheduler.awaiting import Awaiting
from pycollect.scheduler.records import WorkerRecord
from pycollect.scheduler.streams import GroupStreams
from pycollect.scheduler.workers import WorkerGroup
from pycollect.stream.live_policy import LivePolicy
from pycollect.stream.state import CollectorState, WorkerState
from pycollect.worker.generators import derived_seeds

_SERVER = 2**32 - 1  # among what seeds are derived for: ids of workers are smaller


class LiveWeights(LivePolicy):
    """A live policy's weights, for workers that come and go: none of them is given any."""

    def start(self) -> None:
        """They have none to begin with."""

    def check_new(self, workers: Sequence[WorkerRecord]) -> None:
        """They fit any worker."""

    def served(self, worker: WorkerRecord) -> None:
        """Nobody is owed an update."""

    def push_own(self, worker: WorkerRecord, source: Any) -> None:
        """Whoever brings weights for one worker brings them for all."""
        self.receive(source)

    def resume(self, state: CollectorState) -> None:
        """The caller's policy has a state's weights."""
        self.renew_copy()


class PolicyServer(Protocol):
    """Calls the policy for all workers."""

    def seed(self, root: int) -> None:
        """What the policy draws follows from that root from now on."""


class ServedWeights(Protocol):
    """The weights that it is called with."""

    def resume(self, state: CollectorState) -> None:
        """The caller's policy has a state's weights."""


class ServedStreams:
    """Random streams of a group of workers, and that of what the policy draws for all of them."""

    def __init__(
        self,
        group: WorkerGroup,
        awaiting: Awaiting,
        weights: ServedWeights,
        server: PolicyServer,
        policy: Any,
    ) -> None:
        self._workers = GroupStreams(group, awaiting, policy)
        self._weights, self._server = weights, server

    def seed(self, root: int, static: bool) -> int:
        """Seed and reset everything; return the next seed of the chain."""
        self._server.seed(root)
        return self._workers.seed(root, static)

    def states(self) -> dict[int, WorkerState]:
        """Of each present worker, at the end of its last delivered rollout."""
        return self._workers.states()

    def check(self, states: Mapping[int, WorkerState]) -> None:
        """Raise ValueError unless these states fit the workers."""
        self._workers.check(states)

    def resume(self, state: CollectorState) -> None:
        """Give workers generators and the policy its weights; reset.

        What the policy draws follows from the state.
        """
        self._workers.resume(state)
        self._weights.resume(state)
        self._server.seed(derived_seeds(1, state.entropy, state.batches, _SERVER)[0])
