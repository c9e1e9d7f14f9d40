"""Join rollouts of several workers into one batch, in slabs that workers may share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from pycollect._core import (
    Placement,
    RolloutHeader,
    SharedSlabPool,
    Slab,
    SlabPool,
    TrajectoryIds,
    compact,
    copy,
    place_rollout,
)
from pycollect.data.devices import CPU
from pycollect.data.extras import Extras, fitted, joined
from pycollect.data.frame import TRAJ_IDS
from pycollect.data.layout import Key
from pycollect.data.slabs import SlabRows, make_pool, make_shared_pool, slab_tensors
from pycollect.data.tensordicts import spare_memory
from pycollect.data.upload import MOST_IN_FLIGHT, DeviceUploader
from pycollect.driver.source import Batch
from pycollect.transport.limits import limits_named
from pycollect.transport.messages import Rollout, RolloutRequest, WorkerInfo
from pycollect.worker.report import RolloutReport

# The newest batch and the one before it, which a learner still reads.
_SPARE = 2
# Batches on their way to a device, and the one that is about to be.
_SPARE_BEFORE_A_DEVICE = MOST_IN_FLIGHT + 1

Group = tuple[int, ...]
"""The ids of the workers whose rollouts become one batch, in its order."""

_Kind = tuple[Group, int, int, int]


class SharedSlabs:
    """The slabs of each group of workers whose rollouts become one batch.

    A group that comes back with another layout has slabs of its own.

    Args:
        working: how many batches of one group are written, or wait, at a time.
    """

    def __init__(self, working: int) -> None:
        self._working = working
        self._pools: dict[_Kind, SharedSlabPool] = {}
        self._staging: dict[_Kind, SlabPool] = {}  # where a device cannot read those themselves

    def prepare(
        self, workers: Group, placement: Placement, uploader: DeviceUploader | None = None
    ) -> SharedSlabPool:
        """Make the slabs of these workers, unless they are there.

        Args:
            uploader: to the device that their batches go to; None: they stay on the host.

        Raises:
            ValueError: memory cannot hold them; with both numbers.
            SharedMemoryError: processes cannot share memory here.
        """
        kind = _kind(workers, placement)
        if kind not in self._pools:
            spare = _SPARE if uploader is None else _SPARE_BEFORE_A_DEVICE
            with limits_named("the shared memory of batches"):
                pool = make_shared_pool(placement, self._working, spare)
            if uploader is not None and not uploader.pin(pool):
                self._staging[kind] = make_pool(
                    placement, _SPARE_BEFORE_A_DEVICE, uploader.allocate
                )
            self._pools[kind] = pool
        return self._pools[kind]

    def acquire(
        self, workers: Group, placement: Placement, uploader: DeviceUploader | None = None
    ) -> Slab:
        """Return a slab for these workers to write. Arguments and errors as for `prepare`.

        `working` slabs are enough: a worker is asked for another rollout once it has answered an
        older one, also a dropped one, or once its process is gone. The pool adds slabs if others
        are lent for longer, for example to the frames of exceptions that the caller keeps.
        """
        return self.prepare(workers, placement, uploader).acquire()

    def deliver(self, workers: Group, slab: Slab) -> Slab:
        """The slab for the user to keep, or a private copy where too few would remain.

        On its way to a device that cannot read the slab itself it is a copy in pinned memory.
        """
        kind = _kind(workers, slab.placement)
        if kind not in self._staging:
            return self._pools[kind].deliver(slab)
        staged = self._staging[kind].acquire()
        copy(staged.array(), slab.array())
        return staged

    def copies(self, slab: Slab) -> bool:
        """Whether the slab is copied on its way to a device, which cannot read it itself."""
        return bool(self._staging) and slab.memory.address is not None

    def keep(self, groups: Collection[Group]) -> None:
        """Let the memory of all other groups go, but for what the user still has."""
        self._pools = {kind: pool for kind, pool in self._pools.items() if kind[0] in groups}
        self._staging = {kind: own for kind, own in self._staging.items() if kind in self._pools}


def _kind(workers: Group, placement: Placement) -> _Kind:
    layout = placement.layout
    return workers, layout.fingerprint, placement.envs, placement.steps


# The newest batch, the one before it that a learner still reads, and one to write into.
_SLABS_KEPT = 3

_PROCESSES = 2**32  # ids of workers are smaller


@dataclass(frozen=True)
class PendingBatch:
    """A batch whose rollouts are still to come, with all that can be made before.

    Attributes:
        slab: in which its rollouts are to lie.
        infos: of its workers, in the order of their rows.
        uploader: to the device that it goes to; None: it stays on the host.
        steps: of each worker, if no rollout ends early.
        shape: then the batch dimensions.
        tensors: by key.
        ids: each worker's part of the trajectory ids, [P, T].
    """

    slab: Slab
    infos: Sequence[WorkerInfo]
    uploader: DeviceUploader | None
    steps: Sequence[int]
    shape: Sequence[int]
    tensors: dict[Key, torch.Tensor]
    ids: Sequence[torch.Tensor]


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
        uploaders: Mapping[int, DeviceUploader | None],
    ) -> None:
        """Make the slabs that these workers will write; errors as SharedSlabs.prepare's.

        Args:
            in_place: those of them that write into a batch's own rows, in shared memory.
            uploaders: of each worker's batches to their device; None: they stay on the host.
        """
        groups = [tuple(infos)] if self._joined is not None else [(index,) for index in infos]
        self._shared.keep(groups)
        for group in groups:
            if not set(group).isdisjoint(in_place):
                placement = self._placement([infos[index] for index in group])
                self._shared.prepare(group, placement, uploaders[group[0]])

    def rows(
        self,
        infos: Mapping[int, WorkerInfo],
        in_place: bool,
        uploader: DeviceUploader | None = None,
    ) -> Sequence[SlabRows | None]:
        """Where the rollouts of one batch are to lie, by worker.

        Args:
            in_place: some of these workers write there themselves; else there are None.
            uploader: of the batch to its device; None: it stays on the host.
        """
        if not in_place:
            return [None] * len(infos)
        placement = self._placement(list(infos.values()))
        slab = self._shared.acquire(tuple(infos), placement, uploader)
        return [SlabRows(slab, row, self._order) for row in range(len(infos))]

    def pending(
        self,
        request: RolloutRequest,
        infos: Sequence[WorkerInfo],
        uploader: DeviceUploader | None = None,
    ) -> PendingBatch:
        """The batch of these workers' next rollouts, in the slab that the request names, if any.

        Args:
            uploader: of the batch to its device; None: it stays on the host.
        """
        slab = self._pool(infos, uploader).acquire() if request.rows is None else request.rows.slab
        return self._viewed(slab, infos, uploader, [slab.placement.steps] * len(infos))

    def _pool(self, infos: Sequence[WorkerInfo], uploader: DeviceUploader | None) -> SlabPool:
        placement = self._placement(infos)
        layout = placement.layout
        kind = (layout.fingerprint, len(infos), placement.envs, placement.steps, uploader)
        if kind not in self._pools:
            allocate = None if uploader is None else uploader.allocate
            self._pools[kind] = make_pool(placement, _SLABS_KEPT, allocate)
        return self._pools[kind]

    def _placement(self, infos: Sequence[WorkerInfo]) -> Placement:
        """Of a batch of these workers, which are alike but for their steps."""
        layout, envs = infos[0].placement.layout, infos[0].num_envs
        return Placement(layout, len(infos), envs, _longest(infos), self._order)

    def place(self, pending: PendingBatch, row: int, rollout: Rollout) -> RolloutHeader:
        """Copy a rollout into its row of a batch, unless it was written there; its header."""
        if rollout.buffer is None:
            return SlabRows(pending.slab, row, self._order).header()
        return place_rollout(pending.slab, row, rollout.buffer, pending.infos[row].placement)

    def send(self, pending: PendingBatch, row: int) -> None:
        """Have a worker's rollout, which is in its row, travel to the device before the others.

        Where the batch is copied once more on the host, or the row's frames do not lie side by
        side, nothing happens. Ids wait: they become global with the whole batch.
        """
        info, count = pending.infos[0], len(pending.infos)
        may_be_cut = self._uneven and self.along_time(info) and not self._padded
        apart = self._order == "time" and info.num_envs > 1
        if pending.uploader is None or may_be_cut or apart or self._shared.copies(pending.slab):
            return
        leaves = [leaf for key, leaf in pending.tensors.items() if key != TRAJ_IDS and leaf.numel()]
        rows = (leaf.view(count, -1)[row] for leaf in leaves)
        pending.uploader.send(pending.slab, rows)

    def close(self) -> None:
        """Let shared memory go, but for what the user still has."""
        self._shared.keep([])

    def join(
        self,
        pending: PendingBatch,
        reports: Mapping[int, RolloutReport],
        ids: TrajectoryIds,
        place: torch.device = CPU,
        reported: torch.device | None = None,
    ) -> Batch:
        """The batch, for the user to keep; its rollouts are all in their rows.

        Args:
            reports: of each worker, by its id, in the order of its row.
            ids: by which trajectories are numbered over all workers.
            place, reported: as a Batch's.
        """
        info, workers = pending.infos[0], list(reports)
        whole = self._whole(pending, workers)
        sources = {worker: report.sources for worker, report in reports.items()}
        for worker, own in zip(workers, whole.ids, strict=True):
            count = len(sources[worker])
            of_each = [own] if count == 1 else own.chunk(count, -1)
            for source, part in zip(sources[worker], of_each, strict=True):
                ids.renumber(_numbering(worker, source), part)
        return Batch(
            whole.slab,
            whole.tensors,
            whole.shape,
            info.leaves,
            {worker: report.frames for worker, report in reports.items()},
            [episode for report in reports.values() for episode in report.episodes],
            self._extras(list(reports.values()), whole),
            place,
            reported,
            how=self._joined,
            parts=self._parts(whole),
            sources=sources,
            stacked=info.stacked,
        )

    def _parts(self, whole: PendingBatch) -> Sequence[int]:
        """How much of the dimension along which workers follow each other is each one's."""
        info = whole.infos[0]
        return whole.steps if self.along_time(info) else [*info.batch_size[:1]] * len(whole.infos)

    def _extras(self, reports: Sequence[RolloutReport], whole: PendingBatch) -> Extras | None:
        """The extras of several workers' rollouts, in their order, as those of a batch."""
        info = whole.infos[0]
        if not info.leaves.extras:
            return None
        rollouts = [report.extras.value for report in reports if report.extras]
        if self._uneven:  # each as long as it is in the batch: cut or padded
            rollouts = [fitted(*pair) for pair in zip(rollouts, whole.steps, strict=True)]
        return joined(rollouts, -1 if self._joined is None else self._joined, info.batch_size)

    def _whole(self, pending: PendingBatch, workers: Sequence[int]) -> PendingBatch:
        """The batch in the slab that is to be delivered."""
        info, steps = pending.infos[0], pending.steps
        if self._uneven and self.along_time(info) and not self._padded:
            steps = [pending.slab.lengths(row)[0] for row in range(len(steps))]
        if sum(steps) < sum(pending.steps):
            slab = self._without_gaps(pending.slab, sum(steps), pending.uploader)
        elif pending.slab.memory.address is not None:
            slab = self._shared.deliver(tuple(workers), pending.slab)
        else:
            return pending
        if slab is pending.slab:
            return pending
        return self._viewed(slab, pending.infos, pending.uploader, steps)

    def _viewed(
        self,
        slab: Slab,
        infos: Sequence[WorkerInfo],
        uploader: DeviceUploader | None,
        steps: Sequence[int],
    ) -> PendingBatch:
        info = infos[0]
        shape = self._shape(info, steps)
        tensors = slab_tensors(slab, shape, info.leaves.keys)
        ids = self._ids(tensors[TRAJ_IDS], info, steps)
        return PendingBatch(slab, infos, uploader, steps, shape, tensors, ids)

    def _without_gaps(self, slab: Slab, steps: int, uploader: DeviceUploader | None) -> Slab:
        """The cells that workers came to, `steps` of each env in all, copied."""
        batch = slab.placement
        placement = Placement(batch.layout, 1, batch.envs, steps)
        if uploader is None:
            target = self._compacted.acquire(placement)
        else:
            target = make_pool(placement, 0, uploader.allocate_once).acquire()
        compact(target, slab)
        return target

    def _ids(
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
