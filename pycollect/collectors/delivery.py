"""What becomes of an assembled batch on its way to the caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        frames_of: collected frames of each worker, in the order of their rows; uncollected cells
            are not counted.
        leaves: what a frame consists of.
        extras: of its shape each; None where there are none.
        joined: how its workers' rollouts are joined: "stack", 0 or -1; None: it is of one worker.
    """

    tensors: dict[Key, torch.Tensor]
    shape: Sequence[int]
    frames_of: Mapping[int, int]
    episodes: Sequence[Episode]
    leaves: BatchLeaves
    extras: Extras | None = None
    joined: str | int | None = None


def assembled(batch: Batch, options: StreamOptions) -> TensorDictBase:
    """The batch as a TensorDict, its observations in the dtype that was asked for."""
    tensors = batch.tensors
    if options.cast is not None:
        tensors = options.cast.apply(tensors, batch.leaves)
    td: TensorDictBase = to_tensordict(tensors, batch.shape, options.device, batch.leaves.shapes)
    if parcel := batch.leaves.parcel(batch.extras):
        td = with_extras(td, parcel)
    return td


def rollouts_of(td: TensorDictBase, batch: Batch) -> dict[int, TensorDictBase]:
    """Each worker's part of a batch, [T], or [P, T]."""
    workers = list(batch.frames_of)
    if len(workers) == 1 and batch.joined is None:
        parts: Iterable[TensorDictBase] = [td]
    elif batch.joined == "stack":
        parts = td.unbind(0)
    else:
        dim = td.ndim - 1 if batch.joined == -1 else 0
        parts = td.split(td.shape[dim] // len(workers), dim)
    flat = (part if part.ndim <= 2 else part.flatten(0, part.ndim - 2) for part in parts)
    return dict(zip(workers, flat, strict=True))


def finished(td: TensorDictBase, options: StreamOptions) -> TensorDictBase:
    """What the caller gets: split, without ids where they are not wanted, processed."""
    if options.split_trajs and not options.trajs_per_batch:
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
