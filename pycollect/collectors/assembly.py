"""Rollouts of several workers become one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pycollect._core import Placement, RolloutHeader, Slab, SlabPool, TrajectoryIds, place_rollout
from pycollect.batch import TRAJ_IDS, make_pool, slab_tensors
from pycollect.collectors.engine import Rollout
from pycollect.collectors.remote_worker import RolloutNote, WorkerInfo, join_extras
from pycollect.extras import Extras
from pycollect.layout import Key

# The newest batch, the one before it that a learner still reads, and one to write into.
_SLABS_KEPT = 3


class Assembly:
    """Slabs for batches, and how the rollouts of workers lie in them.

    Args:
        joined: how rollouts are joined into one batch: "stack", 0 or -1; None: each is a batch.
    """

    def __init__(self, joined: str | int | None) -> None:
        self._joined = joined
        self._pools: dict[tuple[int, ...], SlabPool] = {}

    def acquire(self, info: WorkerInfo, workers: int) -> Slab:
        """A slab for the rollouts of so many workers, which are all like this one."""
        layout = info.leaves.layout()
        kind = (layout.fingerprint, workers, info.num_envs, info.steps)
        if kind not in self._pools:
            order = "time" if self._joined == -1 else "stack"
            placement = Placement(layout, workers, info.num_envs, info.steps, order)
            self._pools[kind] = make_pool(placement, _SLABS_KEPT)
        return self._pools[kind].acquire()

    def place(self, slab: Slab, row: int, rollout: Rollout, info: WorkerInfo) -> RolloutHeader:
        """Copy a rollout into its row of a batch."""
        return place_rollout(slab, row, rollout.buffer, info.placement)

    def tensors(
        self, slab: Slab, info: WorkerInfo, workers: Sequence[int], ids: TrajectoryIds
    ) -> dict[Key, torch.Tensor]:
        """The batch's tensors, ids numbered over all workers, in worker order."""
        tensors = slab_tensors(slab, self.shape(info, len(workers)), info.leaves.keys)
        shape = (len(workers), info.num_envs, info.steps)
        local = tensors[TRAJ_IDS]
        for row, worker in enumerate(workers):
            if self._joined == -1:
                own = local.view(shape[1], shape[0], shape[2])[:, row]
            else:
                own = local.view(shape)[row]
            ids.renumber(worker, own)
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


def in_flight_bytes(infos: Mapping[int, WorkerInfo], rollouts: int) -> int:
    """What so many rollouts of each worker take."""
    return sum(info.placement.bytes for info in infos.values()) * rollouts
