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
from pycollect.data.upload import MAX_IN_FLIGHT, DeviceUploader
from pycollect.driver.delivery import Batch
from pycollect.errors import limits_named
from pycollect.transport.messages import Rollout, RolloutRequest, WorkerInfo
from pycollect.worker.report import RolloutReport

# The newest batch and the one before it, which a learner still reads.
_SPARE = 2
# Batches that are being uploaded to a device, and the next one.
_SPARE_BEFORE_A_DEVICE = MAX_IN_FLIGHT + 1

Group = tuple[int, ...]
"""Ids of the workers whose rollouts are joined into one batch, in the order of their rows."""

_Kind = tuple[Group, int, int, int]


class SharedSlabs:
    """Slabs of each group of workers that share a batch.

    If the same workers return with another layout, they get separate slabs. `working` is the number
    of batches of one group that are being written, or wait, at a time.
    """

    def __init__(self, working: int) -> None:
        self._working = working
        self._pools: dict[_Kind, SharedSlabPool] = {}
        self._staging: dict[_Kind, SlabPool] = {}  # if the device cannot read the shared slabs

    def prepare(
        self, workers: Group, placement: Placement, uploader: DeviceUploader | None = None
    ) -> SharedSlabPool:
        """Create the slabs of the workers, unless they exist.

        Raises:
            ValueError: The memory is too small; the message contains both sizes.
            SharedMemoryError: Processes cannot share memory here.
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

        `working` slabs are enough, because a worker gets another request only after it has answered
        an older one, even a dropped one, or after its process has ended. The pool adds slabs if
        others are lent for longer, for example to the frames of exceptions that the caller keeps.
        """
        return self.prepare(workers, placement, uploader).acquire()

    def deliver(self, workers: Group, slab: Slab) -> Slab:
        """Return the slab for the user to keep, or a private copy if too few slabs would remain.

        If a device cannot read the slab itself, the result is a copy in pinned memory.
        """
        kind = _kind(workers, slab.placement)
        if kind not in self._staging:
            return self._pools[kind].deliver(slab)
        staged = self._staging[kind].acquire()
        copy(staged.array(), slab.array())
        return staged

    def copies(self, slab: Slab) -> bool:
        """Return whether the slab is copied before its upload; the device cannot read it then."""
        return bool(self._staging) and slab.memory.address is not None

    def keep(self, groups: Collection[Group]) -> None:
        """Free the memory of all other groups, except slabs that the user still holds."""
        self._pools = {kind: pool for kind, pool in self._pools.items() if kind[0] in groups}
        self._staging = {kind: pool for kind, pool in self._staging.items() if kind in self._pools}


def _kind(workers: Group, placement: Placement) -> _Kind:
    layout = placement.layout
    return workers, layout.fingerprint, placement.envs, placement.steps


# The newest batch, the one before it that a learner still reads, and one to write into.
_SLABS_KEPT = 3

_PROCESSES = 2**32  # ids of workers are smaller


@dataclass(frozen=True)
class PendingBatch:
    """A batch with incomplete rollouts, and all views that can be made in advance."""

    slab: Slab  # memory of the rollouts
    infos: Sequence[WorkerInfo]  # properties of the workers, in the order of their rows
    uploader: DeviceUploader | None  # ``None`` if the batch stays on the host
    steps: Sequence[int]  # number of steps of each worker, if no rollout ends early
    shape: Sequence[int]  # batch dimensions for these steps
    tensors: dict[Key, torch.Tensor]  # tensors in the slab, by key
    ids: Sequence[torch.Tensor]  # each worker's part of the trajectory ids, [P, T]


class Assembly:
    """Slabs for batches, and the arrangement of workers' rollouts in them.

    A slab has as many steps as the longest rollout may have. A shorter rollout is followed by
    uncollected cells. If workers are stacked, these cells are delivered. If workers follow each
    other along time, the batch is copied without them, unless `padded` is true.

    Methods with an `uploader`, which uploads the batch to its device, take ``None`` if it stays on
    the host. An argument `infos` has properties of workers, in the order of their rows.

    Args:
        joined: How rollouts are joined into one batch: "stack", 0 or -1; ``None`` if each rollout
            is a batch.
        depth: Number of rollouts per worker that are running, queued or unread at a time.
        uneven: Whether rollouts of one batch may differ in their number of steps.
        padded: Whether uncollected cells stay in every batch.
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
        """Create the slabs that these workers will write; errors as for `SharedSlabs.prepare`.

        Only workers with an id in `in_place` write into the rows of a batch, in shared memory.
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
        """Return the rows of a slab for the rollouts of one batch, by worker.

        They are ``None`` if none of the workers writes `in_place`.
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
        """Return the batch of the workers' next rollouts, in the request's slab if it has one."""
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
        """Return the placement of a batch of workers, which differ at most in their steps."""
        layout, envs = infos[0].placement.layout, infos[0].num_envs
        return Placement(layout, len(infos), envs, _longest(infos), self._order)

    def place(self, pending: PendingBatch, row: int, rollout: Rollout) -> RolloutHeader:
        """Copy a rollout into its row of a batch unless it is there already; return its header."""
        if rollout.buffer is None:
            return SlabRows(pending.slab, row, self._order).header()
        return place_rollout(pending.slab, row, rollout.buffer, pending.infos[row].placement)

    def send(self, pending: PendingBatch, row: int) -> None:
        """Start the upload of a row that is complete, before the other rows.

        Nothing happens if the batch is copied once more on the host, or if the row is not
        contiguous. Trajectory ids are uploaded with the whole batch, because they become global
        only then.
        """
        info, count = pending.infos[0], len(pending.infos)
        may_be_cut = self._uneven and self.along_time(info) and not self._padded
        scattered = self._order == "time" and info.num_envs > 1
        if pending.uploader is None or may_be_cut or scattered or self._shared.copies(pending.slab):
            return
        leaves = [leaf for key, leaf in pending.tensors.items() if key != TRAJ_IDS and leaf.numel()]
        rows = (leaf.view(count, -1)[row] for leaf in leaves)
        pending.uploader.send(pending.slab, rows)

    def close(self) -> None:
        """Free shared memory, except slabs that the user still holds."""
        self._shared.keep([])

    def join(
        self,
        pending: PendingBatch,
        reports: Mapping[int, RolloutReport],
        ids: TrajectoryIds,
        device: torch.device = CPU,
        reported_device: torch.device | None = None,
    ) -> Batch:
        """Return the batch of complete rollouts, for the user; `reports` are in row order."""
        info, workers = pending.infos[0], list(reports)
        whole = self._whole(pending, workers)
        in_time = self.along_time(info)  # the dimension of concatenation
        sources = {worker: report.sources for worker, report in reports.items()}
        for worker, worker_ids in zip(workers, whole.ids, strict=True):
            count = len(sources[worker])
            chunks = [worker_ids] if count == 1 else worker_ids.chunk(count, -1)
            for source, part in zip(sources[worker], chunks, strict=True):
                ids.renumber(_numbering(worker, source), part)
        return Batch(
            whole.slab,
            whole.tensors,
            whole.shape,
            info.leaves,
            {worker: report.frames for worker, report in reports.items()},
            {worker: report.policy_version for worker, report in reports.items()},
            [episode for report in reports.values() for episode in report.episodes],
            self._extras(list(reports.values()), whole),
            device,
            reported_device,
            joined=self._joined,
            parts=whole.steps if in_time else [*info.batch_size[:1]] * len(workers),
            sources=sources,
            stacked=info.stacked,
        )

    def _extras(self, reports: Sequence[RolloutReport], whole: PendingBatch) -> Extras | None:
        """Return the extras of several workers' rollouts, joined in their order."""
        info = whole.infos[0]
        if not info.leaves.extras:
            return None
        rollouts = [report.extras.value for report in reports if report.extras]
        if self._uneven:  # cut or pad the extras to the length in the batch
            rollouts = [fitted(*pair) for pair in zip(rollouts, whole.steps, strict=True)]
        return joined(rollouts, -1 if self._joined is None else self._joined, info.batch_size)

    def _whole(self, pending: PendingBatch, workers: Sequence[int]) -> PendingBatch:
        """Return the batch in the slab to deliver."""
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
        """Return a copy of the slab without uncollected cells."""
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
        """Return each worker's part, [P, T], of a leaf with one number per frame."""
        if self.along_time(info):
            rows = leaf.view(info.num_envs, sum(steps))
            ends = accumulate(steps)
            return [rows[:, end - count : end] for count, end in zip(steps, ends, strict=True)]
        return leaf.view(len(steps), info.num_envs, steps[0]).unbind(0)

    def along_time(self, info: WorkerInfo) -> bool:
        """Return whether workers follow each other along time in a batch."""
        return self._joined == -1 or (self._joined == 0 and not info.batch_size)

    def shape(self, infos: Sequence[WorkerInfo]) -> list[int]:
        """Return the batch dimensions of the workers' batch, if no rollout ends early."""
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
    """Forget the open trajectories of a replaced worker, because its own ids start again."""
    for source in range(max(info.processes, 1)):
        ids.forget(_numbering(worker, source))


def _numbering(worker: int, source: int) -> int:
    """Return a key that identifies one process of a worker among all processes."""
    return worker + _PROCESSES * source
