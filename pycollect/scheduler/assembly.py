"""Rollouts of several workers become one batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import cloudpickle
import torch

from pycollect._core import (
    Placement,
    RolloutHeader,
    Slab,
    SlabPool,
    TrajectoryIds,
    compact,
    place_rollout,
)
from pycollect.batch.extras import Extras, fitted, joined
from pycollect.batch.frame import TRAJ_IDS
from pycollect.batch.layout import Key
from pycollect.batch.slab_views import Target, make_pool, slab_tensors
from pycollect.batch.tensordicts import spare_memory
from pycollect.batch.upload import DeviceBatches
from pycollect.engines.messages import Order, Rollout, RolloutNote, WorkerInfo
from pycollect.scheduler.shared_slabs import SharedSlabs
from pycollect.stream.source import Joined

# The newest batch, the one before it that a learner still reads, and one to write into.
_SLABS_KEPT = 3

_PROCESSES = 2**32  # ids of workers are smaller


@dataclass(frozen=True)
class Views:
    """What a slab looks like as a batch.

    Attributes:
        steps: of each worker.
        shape: the batch dimensions.
        tensors: by key.
        ids: each worker's part of the trajectory ids, [P, T].
    """

    steps: Sequence[int]
    shape: Sequence[int]
    tensors: dict[Key, torch.Tensor]
    ids: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Draft:
    """A batch whose rollouts are still to come, with all that can be made before.

    Attributes:
        slab: in which its rollouts are to lie.
        infos: of its workers, in the order of their rows.
        way: to the device that it goes to; None: it stays on the host.
        views: as it is to be delivered if no rollout ends early.
    """

    slab: Slab
    infos: Sequence[WorkerInfo]
    way: DeviceBatches | None
    views: Views


class Assembly:
    """Slabs for batches, and how the rollouts of workers lie in them.

    A slab has as many steps as the longest rollout may have. Behind the end of a shorter one are
    uncollected cells: they are delivered where workers are stacked; where they follow each other
    along time, the batch is copied without them, unless it is to be padded there, too.

    Args:
        joined: how rollouts are joined into one batch: "stack", 0 or -1; None: each is a batch.
        depth: how many rollouts of a worker there are at a time, running, queued or unread.
        uneven: rollouts of one batch may differ in their numbers of steps.
        padded: uncollected cells stay in every batch.
    """

    def __init__(
        self, joined: str | int | None, depth: int, uneven: bool = False, padded: bool = False
    ) -> None:
        self._joined = joined
        self._uneven, self._padded = uneven, padded
        self._compacted = spare_memory()
        self._order = "time" if joined == -1 else "stack"
        self._pools: dict[tuple[Any, ...], SlabPool] = {}
        self._shared = SharedSlabs(depth)

    def prepare(
        self,
        infos: Mapping[int, WorkerInfo],
        in_place: Collection[int],
        ways: Mapping[int, DeviceBatches | None],
    ) -> None:
        """Make the slabs that these workers will write; errors as SharedSlabs.prepare's.

        Args:
            in_place: those of them that write into a batch's own rows, in shared memory.
            ways: of each worker's batches to their device; None: they stay on the host.
        """
        groups = [tuple(infos)] if self._joined is not None else [(index,) for index in infos]
        self._shared.keep(groups)
        for group in groups:
            if not set(group).isdisjoint(in_place):
                placement = self._placement([infos[index] for index in group])
                self._shared.prepare(group, placement, ways[group[0]])

    def targets(
        self, infos: Mapping[int, WorkerInfo], in_place: bool, way: DeviceBatches | None = None
    ) -> Sequence[Target | None]:
        """Where the rollouts of one batch are to lie, by worker.

        Args:
            in_place: some of these workers write there themselves; else there are None.
            way: of the batch to its device; None: it stays on the host.
        """
        if not in_place:
            return [None] * len(infos)
        placement = self._placement(list(infos.values()))
        slab = self._shared.acquire(tuple(infos), placement, way)
        return [Target(slab, row, self._order) for row in range(len(infos))]

    def draft(
        self, order: Order, infos: Sequence[WorkerInfo], way: DeviceBatches | None = None
    ) -> Draft:
        """The batch of these workers' next rollouts, in the slab that the order names, if it does.

        Args:
            way: of the batch to its device; None: it stays on the host.
        """
        slab = self._pool(infos, way).acquire() if order.target is None else order.target.slab
        steps = [slab.placement.steps] * len(infos)
        return Draft(slab, infos, way, self._views(slab, infos[0], steps))

    def _pool(self, infos: Sequence[WorkerInfo], way: DeviceBatches | None) -> SlabPool:
        placement = self._placement(infos)
        layout = placement.layout
        kind = (layout.fingerprint, len(infos), placement.envs, placement.steps, way)
        if kind not in self._pools:
            allocate = None if way is None else way.allocate
            self._pools[kind] = make_pool(placement, _SLABS_KEPT, allocate)
        return self._pools[kind]

    def _placement(self, infos: Sequence[WorkerInfo]) -> Placement:
        """Of a batch of these workers, which are alike but for their steps."""
        layout, envs = infos[0].placement.layout, infos[0].num_envs
        return Placement(layout, len(infos), envs, _longest(infos), self._order)

    def place(self, draft: Draft, row: int, rollout: Rollout) -> RolloutHeader:
        """Copy a rollout into its row of a batch, unless it was written there."""
        if rollout.buffer is None:
            return Target(draft.slab, row, self._order).header()
        return place_rollout(draft.slab, row, rollout.buffer, draft.infos[row].placement)

    def close(self) -> None:
        """Let shared memory go, but for what the user still has."""
        self._shared.keep([])

    def join(self, draft: Draft, notes: Mapping[int, RolloutNote], ids: TrajectoryIds) -> Joined:
        """The batch, for the user to keep; its rollouts are all in their rows.

        Args:
            notes: of each worker, by its id, in the order of its row.
            ids: by which trajectories are numbered over all workers.
        """
        info, workers = draft.infos[0], list(notes)
        slab, views = self._whole(draft, workers)
        sources = {worker: sources_of(note) for worker, note in notes.items()}
        for worker, own in zip(workers, views.ids, strict=True):
            count = len(sources[worker])
            of_each = [own] if count == 1 else own.chunk(count, -1)
            for source, part in zip(sources[worker], of_each, strict=True):
                ids.renumber(_numbering(worker, source), part)
        extras = join_extras(
            [note.extras for note in notes.values()],
            -1 if self._joined is None else self._joined,
            info,
            views.steps if self._uneven else None,
        )
        along_time = self.along_time(info)
        parts = views.steps if along_time else [*info.batch_size[:1]] * len(workers)
        return Joined(slab, views.tensors, views.shape, extras, self._joined, parts, sources)

    def _whole(self, draft: Draft, workers: Sequence[int]) -> tuple[Slab, Views]:
        """The slab to be delivered, and what it looks like."""
        info, steps = draft.infos[0], draft.views.steps
        if self._uneven and self.along_time(info) and not self._padded:
            steps = [draft.slab.lengths(row)[0] for row in range(len(steps))]
        if sum(steps) < sum(draft.views.steps):
            slab = self._without_gaps(draft.slab, sum(steps), draft.way)
        elif draft.slab.memory.address is not None:
            slab = self._shared.deliver(tuple(workers), draft.slab)
        else:
            slab = draft.slab
        return slab, draft.views if slab is draft.slab else self._views(slab, info, steps)

    def _views(self, slab: Slab, info: WorkerInfo, steps: Sequence[int]) -> Views:
        shape = self._shape(info, steps)
        tensors = slab_tensors(slab, shape, info.leaves.keys)
        return Views(steps, shape, tensors, self._rows(tensors[TRAJ_IDS], info, steps))

    def _without_gaps(self, slab: Slab, steps: int, way: DeviceBatches | None) -> Slab:
        """The cells that workers came to, `steps` of each env in all, copied."""
        batch = slab.placement
        placement = Placement(batch.layout, 1, batch.envs, steps)
        if way is None:
            target = self._compacted.acquire(placement)
        else:  # torch keeps pinned memory itself, of whatever size
            target = make_pool(placement, 0, way.allocate).acquire()
        compact(target, slab)
        return target

    def _rows(
        self, leaf: torch.Tensor, info: WorkerInfo, steps: Sequence[int]
    ) -> Sequence[torch.Tensor]:
        """Each worker's rows, [P, T], of a leaf of the batch that has one number per frame."""
        if self.along_time(info):
            rows = leaf.view(info.num_envs, sum(steps))
            ends = accumulate(steps)
            return [rows[:, end - own : end] for own, end in zip(steps, ends, strict=True)]
        return leaf.view(len(steps), info.num_envs, steps[0]).unbind(0)

    def along_time(self, info: WorkerInfo) -> bool:
        """Whether workers follow each other along time."""
        return self._joined == -1 or (self._joined == 0 and not info.batch_size)

    def shape(self, infos: Sequence[WorkerInfo]) -> list[int]:
        """The batch dimensions of what these workers fill if none ends early."""
        if self.along_time(infos[0]):
            return self._shape(infos[0], [info.steps for info in infos])
        return self._shape(infos[0], [_longest(infos)] * len(infos))

    def _shape(self, info: WorkerInfo, steps: Sequence[int]) -> list[int]:
        envs, workers = info.batch_size, len(steps)
        if self._joined is None:
            return [*envs, steps[0]]
        if self._joined == "stack":
            return [workers, *envs, steps[0]]
        if self.along_time(info):
            return [*envs, sum(steps)]
        return [workers * envs[0], *envs[1:], steps[0]]


def _longest(infos: Sequence[WorkerInfo]) -> int:
    return max(info.steps for info in infos)


def sources_of(note: RolloutNote) -> Sequence[int]:
    """The numbers of those of a worker's processes whose parts of a rollout follow each other."""
    return (0,) if note.team is None else note.team.sources


def forget_ids(ids: TrajectoryIds, worker: int, info: WorkerInfo) -> None:
    """A worker was replaced: its open trajectories end, and its ids begin anew."""
    for source in range(max(info.processes, 1)):
        ids.forget(_numbering(worker, source))


def in_flight_bytes(infos: Mapping[int, WorkerInfo], rollouts: int) -> int:
    """What so many rollouts of each worker take."""
    return sum(info.placement.bytes for info in infos.values()) * rollouts


def _numbering(worker: int, source: int) -> int:
    """By what the ids of one process of a worker are told from those of all others."""
    return worker + _PROCESSES * source


def join_extras(
    pickled: Sequence[bytes | None],
    join: str | int,
    info: WorkerInfo,
    steps: Sequence[int] | None = None,
) -> Extras | None:
    """The extras of several workers' rollouts, in their order, as those of a batch.

    Args:
        steps: how many each is to have in the batch, cut or padded; None: as many as it has.
    """
    if not info.leaves.extras:
        return None
    rollouts = [cloudpickle.loads(data) for data in pickled]
    if steps is not None:
        rollouts = [fitted(own, count) for own, count in zip(rollouts, steps, strict=True)]
    return joined(rollouts, join, info.batch_size)
