"""Seeds and random generators of workers and inference servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pycollect.data.weights import NO_WEIGHTS, load_weights
from pycollect.driver.state import CollectorState, WorkerState, check_generators
from pycollect.driver.waiting import Awaiting
from pycollect.driver.workers import WorkerGroup
from pycollect.worker.generators import derived_seeds, seed_chain


class GroupStreams:
    """Those of a group of workers. Nothing is in flight where they are seeded or resumed.

    Args:
        policy: the caller's, which a state's weights are written into; or None.
    """

    def __init__(self, group: WorkerGroup, awaiting: Awaiting, policy: Any) -> None:
        self._group, self._awaiting, self._policy = group, awaiting, policy

    def seed(self, root: int, static: bool) -> int:
        """Seed and reset everything; return the next seed of the chain."""
        seeds: dict[int, list[int]] = {}
        following = root
        for worker in sorted(self._group.present, key=lambda worker: worker.index):
            count = worker.info.num_seeds
            seeds[worker.index], following = seed_chain(following, count, static)
            worker.report = None
        self._awaiting.begin_all({index: ("set_seed", own, root) for index, own in seeds.items()})
        return following

    def states(self) -> dict[int, WorkerState]:
        """Of each present worker, at the end of its last delivered rollout."""
        own = self._group.weights.own
        return {
            worker.index: WorkerState(worker.generators, own.get(worker.index, NO_WEIGHTS))
            for worker in self._group.present
        }

    def check(self, states: Mapping[int, WorkerState]) -> None:
        """Raise ValueError unless these states fit the workers."""
        for worker in self._group.present:
            info, state = worker.info, states[worker.index]
            check_generators(worker.index, state, info.processes, info.num_envs)
            if state.policy:
                self._group.weights.check(state.policy, [worker])

    def resume(self, state: CollectorState) -> None:
        """Give workers generators, weights and version; reset."""
        if state.policy and self._policy is not None:
            load_weights(self._policy, state.policy)
        calls: dict[int, tuple[Any, ...]] = {}
        present, sender = self._group.present, self._group.weights
        for worker in present:
            own = state.workers[worker.index].generators
            if own is None:
                seeds = worker.seeds(state.entropy, state.batches)
                root = derived_seeds(1, state.entropy, state.batches)[0]
                calls[worker.index] = ("set_seed", seeds, root)
            else:
                calls[worker.index] = worker.resumption(own, state.entropy, state.batches)
            worker.report = None
            worker.version = state.policy_version
            worker.frames = state.ledger.get(str(worker.index), {}).get("delivered", 0)
        self._awaiting.begin_all(calls)
        # Now that what was dropped has ended, which might have changed buffers of the policy.
        if state.policy or not any(worker.info.weights.leaves for worker in present):
            sender.send(state.policy, present, state.policy_version)
        for worker in present:
            if own_policy := state.workers[worker.index].policy:
                sender.send(own_policy, [worker], state.policy_version, own=True)


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
