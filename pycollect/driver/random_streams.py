"""Seeds and random generators of workers and inference servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pycollect.data.weights import NO_WEIGHTS, load_weights
from pycollect.driver.state import CollectorState, WorkerState, check_generators
from pycollect.driver.waiting import WorkerWaiter
from pycollect.driver.workers import WorkerGroup
from pycollect.transport.spec import set_seed
from pycollect.worker.generators import derived_seeds, seed_chain


class GroupStreams:
    """Random streams of a group of workers, seeded or resumed while nothing is in flight.

    Args:
        group: The workers.
        waiter: Waits for the workers.
        policy: The caller's policy, which receives the weights of a state, or ``None``.
    """

    def __init__(self, group: WorkerGroup, waiter: WorkerWaiter, policy: Any) -> None:
        self._group, self._waiter, self._policy = group, waiter, policy

    def seed(self, root: int, static: bool) -> int:
        """Seed and reset everything; return the next seed of the chain."""
        seeds: dict[int, list[int]] = {}
        following = root
        for worker in sorted(self._group.present, key=lambda worker: worker.index):
            count = worker.info.num_seeds
            first = root if static else following
            seeds[worker.index], following = seed_chain(first, count, static)
            worker.report = None
        self._waiter.begin_all(
            {index: (set_seed, worker_seeds, root) for index, worker_seeds in seeds.items()}
        )
        return following

    def states(self) -> dict[int, WorkerState]:
        """Return the state of each present worker at the end of its last delivered rollout."""
        individual = self._group.weights.individual
        return {
            worker.index: WorkerState(worker.generators, individual.get(worker.index, NO_WEIGHTS))
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
        """Restore the weights, policy version and generators of the workers, and reset them."""
        if state.policy and self._policy is not None:
            load_weights(self._policy, state.policy)
        calls: dict[int, tuple[Any, ...]] = {}
        present, sender = self._group.present, self._group.weights
        for worker in present:
            generators = state.workers[worker.index].generators
            if generators is None:
                seeds = worker.seeds(state.entropy, state.batches)
                root = derived_seeds(1, state.entropy, state.batches)[0]
                calls[worker.index] = (set_seed, seeds, root)
            else:
                calls[worker.index] = worker.resumption(generators, state.entropy, state.batches)
            worker.report = None
            worker.version = state.policy_version
            worker.frames = state.ledger.get(str(worker.index), {}).get("delivered", 0)
        self._waiter.begin_all(calls)
        # Dropped rollouts have ended now; before, they could have changed buffers of the policy.
        if state.policy or not any(worker.info.weights.leaves for worker in present):
            sender.send(state.policy, present, state.policy_version)
        for worker in present:
            if weights := state.workers[worker.index].policy:
                sender.send(weights, [worker], state.policy_version, individual=True)


_SERVER = 2**32 - 1  # key of the server's seed; ids of workers are smaller


class ServedStreams:
    """Random streams of a group of workers and of their inference server.

    Args:
        group: The workers.
        waiter: Waits for the workers.
        resume_weights: Sends the weights of a state to whatever calls the policy.
        seed_server: Seeds the policy's random draws.
        policy: The caller's policy, which receives the weights of a state, or ``None``.
    """

    def __init__(
        self,
        group: WorkerGroup,
        waiter: WorkerWaiter,
        resume_weights: Callable[[CollectorState], None],
        seed_server: Callable[[int], None],
        policy: Any,
    ) -> None:
        self._workers = GroupStreams(group, waiter, policy)
        self._resume_weights, self._seed_server = resume_weights, seed_server

    def seed(self, root: int, static: bool) -> int:
        """Seed and reset everything; return the next seed of the chain."""
        self._seed_server(root)
        return self._workers.seed(root, static)

    def states(self) -> dict[int, WorkerState]:
        """Return the state of each present worker at the end of its last delivered rollout."""
        return self._workers.states()

    def check(self, states: Mapping[int, WorkerState]) -> None:
        """Raise ValueError unless these states fit the workers."""
        self._workers.check(states)

    def resume(self, state: CollectorState) -> None:
        """Restore workers, weights and policy version; seed the server from the state."""
        self._workers.resume(state)
        self._resume_weights(state)
        self._seed_server(derived_seeds(1, state.entropy, state.batches, _SERVER)[0])
