"""Random streams of workers whose policy is called for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pycollect.scheduler.awaiting import Awaiting
from pycollect.scheduler.streams import GroupStreams
from pycollect.scheduler.workers import WorkerGroup
from pycollect.stream.state import CollectorState, WorkerState
from pycollect.worker.generators import derived_seeds

_SERVER = 2**32 - 1  # among what seeds are derived for: ids of workers are smaller


class SeededServer(Protocol):
    """Calls the policy for workers."""

    def seed(self, root: int) -> None:
        """What the policy draws follows from that root from now on."""


class ServedWeights(Protocol):
    """The weights that it is called with."""

    def resume(self, state: CollectorState) -> None:
        """The caller's policy has a state's weights."""


class ServedStreams:
    """Random streams of a group of workers, and those of what the policy draws for them.

    Args:
        servers: all who call it.
    """

    def __init__(
        self,
        group: WorkerGroup,
        awaiting: Awaiting,
        weights: ServedWeights,
        servers: Sequence[SeededServer],
        policy: Any,
    ) -> None:
        self._workers = GroupStreams(group, awaiting, policy)
        self._weights, self._servers = weights, servers

    def seed(self, root: int, static: bool) -> int:
        """Seed and reset everything; return the next seed of the chain."""
        self._seed_servers(root)
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
        self._seed_servers(derived_seeds(1, state.entropy, state.batches, _SERVER)[0])

    def _seed_servers(self, root: int) -> None:
        for server in self._servers:
            server.seed(root)
