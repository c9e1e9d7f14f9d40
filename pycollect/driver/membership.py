"""Change the workers of a scheduler between batches: add, remove, reset, seed and resume them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycollect._core import Uninterrupted
from pycollect.checks import check_open, check_worker_ids
from pycollect.data.generators import derived_seeds, seed_chain
from pycollect.data.weights import NO_WEIGHTS, load_weights
from pycollect.driver.assembly import Assembly
from pycollect.driver.flow import Flow
from pycollect.driver.options import RemoteOptions, check_uneven
from pycollect.driver.policy_place import PolicyPlace
from pycollect.driver.records import WorkerPlan, WorkerRecord
from pycollect.driver.state import CollectorState, WorkerState, check_generators
from pycollect.driver.waiting import WorkerWaiter
from pycollect.driver.workers import WorkerGroup, check_alike
from pycollect.errors import warn_user
from pycollect.transport.messages import reset, set_seed


class Membership:
    """Starts the first workers; adds, removes and resets workers later.

    If async, a new worker collects at once, and a removed worker ends after it has delivered its
    requested rollouts. If sync, all changes happen between two rounds, and the workers share the
    frames of a batch anew.
    """

    def __init__(
        self,
        flow: Flow,
        group: WorkerGroup,
        waiter: WorkerWaiter,
        place: PolicyPlace,
        assembly: Assembly,
        options: RemoteOptions,
    ) -> None:
        self._flow, self._group, self._waiter = flow, group, waiter
        self._place, self._assembly, self._options = place, assembly, options
        self._next_index = 0
        self.batch_frames = 0
        self.changed = False  # whether workers that share frames changed since they last shared

    def start(self, plans: Sequence[WorkerPlan]) -> None:
        """Start the first workers and check them."""
        self._group.start(plans, self._place.check_alive)
        self._next_index = len(plans)
        self._check(self._group.present)
        frames = [info.frames for info in self._group.infos.values()]
        self.batch_frames = sum(frames) if self._options.sync else max(frames)

    def prepare_slabs(self) -> None:
        """Create the slabs that the present workers will write, and free all others."""
        present = self._group.present
        in_place = [worker.index for worker in present if worker.in_place]
        uploaders = {
            worker.index: self._flow.uploads.uploader_for(worker.batch_device) for worker in present
        }
        self._assembly.prepare(self._group.infos, in_place, uploaders)

    def _check(self, workers: Sequence[WorkerRecord]) -> None:
        if self._options.sync:
            check_alike(self._group.infos)
        for worker in workers:
            info = worker.info
            check_uneven(self._options.joined, self._options.ragged, bool(info.batch_size))
            self._flow.check_environment(info.leaves, info.bounded)

    def add(self, plans: Callable[[int], Sequence[WorkerPlan]]) -> list[int]:
        """Start more workers by `plans`, which gets their first id; return their ids."""
        with self._flow.moving:
            self._flow.check_not_collecting("add_collectors")
            self._flow.check_open()
            made = plans(self._next_index)
            self._next_index += len(made)
            workers = self._group.start(made, self._place.check_alive)
            try:
                self._accept(workers)
            except BaseException:
                self._group.discard(workers)
                raise
            self.changed = self._options.sync
            return [worker.index for worker in workers]

    def _accept(self, workers: Sequence[WorkerRecord]) -> None:
        self._check(workers)
        self._place.check_new(workers)
        if not self._options.sync:
            self.prepare_slabs()
        for worker in workers:
            self._initialize(worker)

    def _initialize(self, worker: WorkerRecord) -> None:
        """Send a new worker the newest weights and hooks, and seed it if the stream is seeded."""
        flow = self._flow
        self._group.weights.send_newest(worker)
        self._place.initialize(worker)
        self._group.hooks.send_kept(worker)
        if flow.seeded:
            seeds = worker.seeds(flow.entropy, flow.statistics.batches)
            worker.initial_call = set_seed, seeds, flow.entropy
            self._waiter.call_all({worker.index: worker.initial_call})

    def remove(self, worker_ids: int | Sequence[int]) -> None:
        """End workers once they have delivered their requested rollouts."""
        with self._flow.moving:
            self._flow.check_not_collecting("remove_collectors")
            self._flow.check_open()
            present = [worker.index for worker in self._group.present if not worker.leaving]
            ids = check_worker_ids(worker_ids, present)
            if len(set(ids)) == len(present):
                raise ValueError(
                    f"worker_ids: at least one worker must stay, got all of them: {ids}; use "
                    "stop_remote_collectors() to end all workers"
                )
            for worker in self._group.of(ids):
                worker.leaving = True
            self.changed = self._options.sync or self.changed
            self.settle()

    def end_all(self) -> None:
        """End all workers; frames in flight are lost."""
        with self._flow.moving:
            self._flow.check_not_collecting("stop_remote_collectors")
            check_open(self._flow.closed)
            self._drop_all("shutdown")
            self._group.end(self._group.present)
            self.changed = False

    def drop(self, reason: str) -> None:
        """Drop everything in flight, and end leaving workers."""
        self._drop_all(reason)
        self.settle()

    def _drop_all(self, reason: str) -> None:
        with Uninterrupted():
            self._flow.drop(reason)
            for worker in self._group.present:
                worker.drop()

    def reset(self, flags: Sequence[bool] | None) -> None:
        """Reset the environments of some workers, by id, or of all; drop their rollouts."""
        flow = self._flow
        chosen = self._chosen(flags)
        if len(chosen) == len(self._group.present):
            self.drop("reset")
            chosen = self._group.present
        elif self._options.sync and flow.ledger.in_flight:
            raise RuntimeError(
                "reset_idx: expected all workers, because prefetched rollouts of all are in "
                "flight; use prefetch=0 to reset only some"
            )
        for worker in chosen:
            with Uninterrupted():
                flow.lose_worker(worker.index, worker.frames_in_flight, "reset")
                worker.drop()
        self._waiter.call_all({worker.index: (reset,) for worker in chosen})

    def _chosen(self, flags: Sequence[bool] | None) -> list[WorkerRecord]:
        if flags is None:
            return self._group.present
        workers = self._group.in_order
        if len(flags) != len(workers):
            raise ValueError(
                f"reset_idx: expected one flag per worker ({len(workers)}), got {len(flags)}"
            )
        return [worker for worker, is_chosen in zip(workers, flags, strict=True) if is_chosen]

    def settle(self) -> None:
        """End leaving workers without requests; sync: all at once, between two rounds."""
        if self._flow.queue is not None and self._flow.unclaimed is not None:
            return  # the collected batch may continue their trajectories, which end with them
        present = self._group.present
        done = [worker for worker in present if worker.leaving and not worker.requests]
        if self._options.sync and any(worker.requests for worker in present):
            return
        if done:
            self._group.end(done)
        if self.changed:
            self._share_out()
        elif done:
            self.prepare_slabs()

    def _share_out(self) -> None:
        """Divide the frames of a batch equally among the workers of a sync collector."""
        workers = self._group.present
        self._waiter.resize(-(-self._flow.options.frames_per_batch // len(workers)))
        self.batch_frames = sum(worker.info.frames for worker in workers)
        self.prepare_slabs()
        self.changed = False  # after an interrupt before, they are shared again
        shape = self._assembly.shape([worker.info for worker in workers])
        count = f"{len(workers)} worker{'s' if len(workers) > 1 else ''}"
        warn_user(f"from the next batch on, batches come from {count} and have shape {shape}")


_PLACE = 2**32 - 1  # key of the place's seed; ids of workers are smaller


class GroupStreams:
    """Random streams of a group of workers, seeded or resumed while nothing is in flight."""

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
            own = state.workers[worker.index]
            if own.generators is None:
                seeds = worker.seeds(state.entropy, state.batches)
                root = derived_seeds(1, state.entropy, state.batches)[0]
                calls[worker.index] = (set_seed, seeds, root)
            else:
                moment = state.entropy, state.batches
                calls[worker.index] = worker.resumption(own.generators, *moment)
            worker.report = None
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
