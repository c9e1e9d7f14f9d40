"""Random streams of workers elsewhere: seeded, told, resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pycollect.batch.weight_slab import load_weights
from pycollect.batch.weights import NO_WEIGHTS
from pycollect.scheduler.awaiting import Awaiting
from pycollect.scheduler.workers import WorkerGroup
from pycollect.stream.state import CollectorState, WorkerState, check_generators
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
