"""Rollouts of several workers become one batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from pycollect._core import Placement, RolloutHeader, Slab, SlabPool, TrajectoryIds, place_rollout
from pycollect.batch import TRAJ_IDS, Target, make_pool, slab_tensors
from pycollect.collectors.engine import Order, Rollout
from pycollect.collectors.remote_worker import RolloutNote, WorkerInfo, join_extras
from pycollect.collectors.shared_slabs import SharedSlabs
from pycollect.collectors.upload import Allocate
from pycollect.extras import Extras
from pycollect.layout import Key

# The newest batch, the one before it that a learner still reads, and one to write into.
_SLABS_KEPT = 3

_PROCESSES = 2**32  # ids of workers are smaller


class Assembly:
    """Slabs for batches, and how the rollouts of workers lie in them.

    Args:
        joined: how rollouts are joined into one batch: "stack", 0 or -1; None: each is a batch.
        depth: how many rollouts of a worker there are at a time, running, queued or unread.
    """

    def __init__(self, joined: str | int | None, depth: int) -> None:
        self._joined = joined
        self._order = "time" if joined == -1 else "stack"
        self._pools: dict[tuple[Any, ...], SlabPool] = {}
        self._shared = SharedSlabs(depth)

    def prepare(self, infos: Mapping[int, WorkerInfo], in_place: Collection[int]) -> None:
        """Make the slabs that these workers will write; errors as SharedSlabs.prepare's.

        Args:
            in_place: those of them that write into a batch's own rows, in shared memory.
        """
        groups = [tuple(infos)] if self._joined is not None else [(index,) for index in infos]
        self._shared.keep(groups)
        for group in groups:
            if not set(group).isdisjoint(in_place):
                self._shared.prepare(group, self._placement(infos[group[0]], len(group)))

    def targets(self, infos: Mapping[int, WorkerInfo], in_place: bool) -> Sequence[Target | None]:
        """Where the rollouts of one batch are to lie, by worker.

        Args:
            in_place: some of these workers write there themselves; else there are None.
        """
        if not in_place:
            return [None] * len(infos)
        placement = self._placement(next(iter(infos.values())), len(infos))
        slab = self._shared.acquire(tuple(infos), placement)
        return [Target(slab, row, self._order) for row in range(len(infos))]

    def slab_for(
        self, order: Order, info: WorkerInfo, workers: int, allocate: Allocate | None
    ) -> Slab:
        """The batch's slab: what the order names, else one for so many workers like this one.

        Args:
            allocate: gives its memory, see :class:`SlabPool`; the same each time for a worker.
        """
        if order.target is not None:
            return order.target.slab
        layout = info.leaves.layout()
        kind = (layout.fingerprint, workers, info.num_envs, info.steps, allocate)
        if kind not in self._pools:
            placement = self._placement(info, workers)
            self._pools[kind] = make_pool(placement, _SLABS_KEPT, allocate)
        return self._pools[kind].acquire()

    def _placement(self, info: WorkerInfo, workers: int) -> Placement:
        return Placement(info.leaves.layout(), workers, info.num_envs, info.steps, self._order)

    def place(self, slab: Slab, row: int, rollout: Rollout, info: WorkerInfo) -> RolloutHeader:
        """Copy a rollout into its row of a batch, unless it was written there."""
        if rollout.buffer is None:
            return Target(slab, row, self._order).header()
        return place_rollout(slab, row, rollout.buffer, info.placement)

    def deliver(self, slab: Slab, workers: Sequence[int]) -> Slab:
        """A batch's slab for the user to keep: that one or a copy of it."""
        is_shared = slab.memory.address is not None
        return self._shared.deliver(tuple(workers), slab) if is_shared else slab

    def close(self) -> None:
        """Let shared memory go, but for what the user still has."""
        self._shared.keep([])

    def tensors(
        self,
        slab: Slab,
        info: WorkerInfo,
        sources: Mapping[int, Sequence[int]],
        ids: TrajectoryIds,
    ) -> dict[Key, torch.Tensor]:
        """The batch's tensors, ids numbered over all workers, in worker order.

        Args:
            sources: of each worker, in the order of rows, see `sources_of`.
        """
        workers = list(sources)
        tensors = slab_tensors(slab, self.shape(info, len(workers)), info.leaves.keys)
        shape = (len(workers), info.num_envs, info.steps)
        local = tensors[TRAJ_IDS]
        for row, worker in enumerate(workers):
            if self._joined == -1:
                own = local.view(shape[1], shape[0], shape[2])[:, row]
            else:
                own = local.view(shape)[row]
            parts = own.chunk(len(sources[worker]), -1)
            for source, part in zip(sources[worker], parts, strict=True):
                ids.renumber(worker + _PROCESSES * source, part)
        return tensors

    def extras(self, notes: Sequence[RolloutNote], info: WorkerInfo) -> Extras | None:
        """The extras of those rollouts as the batch's."""
        join = -1 if self._joined is None else self._joined
        return join_extras([note.extras for note in notes], join, info)

    def shape(self, info: WorkerInfo, workers: int) -> list[int]:
        """The batch dimensions of what is delivered."""
        envs, steps = info.batch_size, info.steps
        if self._joined is None:
            return [*envs, steps]
        if self._joined == "stack":
            return [workers, *envs, steps]
        if self._joined == -1 or not envs:
            return [*envs, workers * steps]
        return [workers * envs[0], *envs[1:], steps]


def sources_of(note: RolloutNote) -> Sequence[int]:
    """The numbers of those of a worker's processes whose parts of a rollout follow each other."""
    return (0,) if note.team is None else note.team.sources


def forget_ids(ids: TrajectoryIds, worker: int, info: WorkerInfo) -> None:
    """A worker was replaced: its open trajectories end, and its ids begin anew."""
    for source in range(max(info.processes, 1)):
        ids.forget(worker + _PROCESSES * source)


def in_flight_bytes(infos: Mapping[int, WorkerInfo], rollouts: int) -> int:
    """What so many rollouts of each worker take."""
    return sum(info.placement.bytes for info in infos.values()) * rollouts
