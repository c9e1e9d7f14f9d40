"""Seeds and random generators of workers and inference servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycollect.data.generators import derived_seeds, seed_chain
from pycollect.data.weights import NO_WEIGHTS, load_weights
from pycollect.driver.policy_place import PolicyPlace
from pycollect.driver.state import CollectorState, WorkerState, check_generators
from pycollect.driver.waiting import WorkerWaiter
from pycollect.driver.workers import WorkerGroup
from pycollect.transport.messages import set_seed

_PLACE = 2**32 - 1  # key of the place's seed; ids of workers are smaller


class GroupStreams:
    """Random streams of a group of workers, seeded or resumed while nothing is in flight.

    Args:
        group: The workers.
        waiter: Waits for the workers.
        place: Where the policy is called.
    """

    def __init__(self, group: WorkerGroup, waiter: WorkerWaiter, place: PolicyPlace) -> None:
        self._group, self._waiter, self._place = group, waiter, place

    def seed(self, root: int, static: bool) -> int:
        """Seed and reset everything; return the next seed of the chain."""
        self._place.seed(root)
        seeds: dict[int, list[int]] = {}
        following = root
        for worker in sorted(self._group.present, key=lambda worker: worker.index):
            count = worker.info.num_seeds
            seeds[worker.index], following = seed_chain(following, count, static)
            worker.report = None
        self._waiter.begin_all(
            {index: (set_seed, worker_seeds, root) for index, worker_seeds in seeds.items()}
        )
        return following

    def states(self) -> dict[int, WorkerState]:
        """Return the state of each present worker at the end of its last delivered rollout."""
        individual = self._group.weights.individual
        return {
            worker.index: WorkerState(
                worker.generators, *individual.get(worker.index, (NO_WEIGHTS, 0))
            )
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
        if state.policy and self._place.policy is not None:
            load_weights(self._place.policy, state.policy)
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
            own = state.workers[worker.index]
            worker.version = own.version if own.policy else state.policy_version
            worker.frames = state.ledger.get(str(worker.index), {}).get("delivered", 0)
        self._waiter.begin_all(calls)
        # Dropped rollouts have ended now; before, they could have changed buffers of the policy.
        if state.policy or not any(worker.info.weights.leaves for worker in present):
            sender.send(state.policy, present, state.policy_version)
        individual = [worker for worker in present if state.workers[worker.index].policy]
        for worker in individual:
            own = state.workers[worker.index]
            sender.send(own.policy, [worker], own.version, individual=True)
        if individual and state.policy:  # workers that are added later get the common weights
            sender.send(state.policy, [], state.policy_version)
        self._place.resume(state)
        self._place.seed(derived_seeds(1, state.entropy, state.batches, _PLACE)[0])
