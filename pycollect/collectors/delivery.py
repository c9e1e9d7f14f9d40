"""What becomes of an assembled batch on its way to the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase

from pycollect.batch import MASK, TRAJ_IDS, BatchLeaves, to_tensordict
from pycollect.collectors.options import StreamOptions
from pycollect.extras import Extras
from pycollect.extras_delivery import with_extras
from pycollect.layout import Key
from pycollect.trajectory import split_trajectories
from pycollect.worker import Episode


@dataclass(frozen=True)
class Batch:
    """An assembled batch before it is delivered.

    Attributes:
        shape: its batch dimensions, time last.
        frames_of: collected frames of each worker; uncollected cells are not counted.
        leaves: what a frame consists of.
        extras: of its shape each; None where there are none.
    """

    tensors: dict[Key, torch.Tensor]
    shape: Sequence[int]
    frames_of: Mapping[int, int]
    episodes: Sequence[Episode]
    leaves: BatchLeaves
    extras: Extras | None = None

    @property
    def frames(self) -> int:
        """Collected frames of all workers."""
        return sum(self.frames_of.values())


def deliver(batch: Batch, options: StreamOptions) -> TensorDictBase:
    """The batch as the caller gets it: split, without ids where they are not wanted, processed."""
    td: TensorDictBase = to_tensordict(
        batch.tensors, batch.shape, options.device, batch.leaves.shapes
    )
    if parcel := batch.leaves.parcel(batch.extras):
        td = with_extras(td, parcel)
    if options.split_trajs:
        td = split_trajectories(td)
    if not options.track_traj_ids:
        td = _without_ids(td)
    if options.postproc is not None:
        td = options.postproc(td)
        if td is None:
            raise TypeError("postproc: expected it to return the batch, got None")
    return td


def _without_ids(td: TensorDictBase) -> TensorDictBase:
    td = td.exclude(TRAJ_IDS)
    if td.get("collector").is_empty():
        td = td.exclude("collector")
    return td


def extend(td: TensorDictBase, options: StreamOptions) -> None:
    """Give a batch to the replay buffer: as it is, or as single frames.

    Single frames are in row-major order, each env's in the order of time, and cells without a frame
    are left out.
    """
    if not options.extend_buffer:
        mask = td.get(MASK, None)
        td = td.reshape(-1) if mask is None else td[mask]
    options.replay_buffer.extend(td)
