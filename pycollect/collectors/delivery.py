"""What becomes of an assembled batch on its way to the caller."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from tensordict import TensorDictBase

from pycollect._core import Slab
from pycollect.batch import TRAJ_IDS, BatchLeaves, to_tensordict
from pycollect.collectors.options import StreamOptions
from pycollect.collectors.upload import Uploads
from pycollect.devices import CPU
from pycollect.extras import Extras
from pycollect.extras_delivery import with_extras
from pycollect.layout import Key
from pycollect.rollout_report import Episode
from pycollect.trajectory import split_with_plan


@dataclass(frozen=True)
class Joined:
    """Rollouts that became a batch.

    Attributes:
        slab: in which the tensors lie.
        shape: the batch dimensions, time last.
        extras: of that shape each; None where there are none.
        how: "stack", 0 or -1; None: it is one rollout.
        parts: where they are joined by a number, how much of that dimension is each one's.
        sources: of workers with processes of their own, which of these follow each other along time
            in the worker's part.
    """

    slab: Slab
    tensors: dict[Key, torch.Tensor]
    shape: Sequence[int]
    extras: Extras | None = None
    how: str | int | None = None
    parts: Sequence[int] = ()
    sources: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """An assembled batch before it is delivered.

    Attributes:
        frames_of: collected frames of each worker, in the order of their rows; uncollected cells
            are not counted.
        leaves: what a frame consists of.
        place: where it is to lie.
        told: what ``td.device`` says; None: nobody asked for a device.
        there: tensors that lie in no slab but on the environments' device, by key.
        beside: the first dimension of each worker's rollout is that of its own processes.
    """

    joined: Joined
    frames_of: Mapping[int, int]
    episodes: Sequence[Episode]
    leaves: BatchLeaves
    place: torch.device = CPU
    told: torch.device | None = None
    there: Mapping[Key, torch.Tensor] = field(default_factory=dict)
    beside: bool = False


def assembled(batch: Batch, options: StreamOptions, uploads: Uploads | None) -> TensorDictBase:
    """The batch as a TensorDict, its observations in the dtype that was asked for.

    Args:
        uploads: what brings it to its place; None: it stays on the host.
    """
    cast = partial(options.cast.apply, leaves=batch.leaves) if options.cast else None
    joined, device = batch.joined, batch.told
    tensors = joined.tensors
    if batch.place.type == "cpu" or uploads is None:
        tensors = tensors if cast is None else cast(tensors)
        device = device if batch.place.type == "cpu" else None
    else:
        there = uploads.to(batch.place)
        tensors = there.upload(joined.slab, tensors, cast)
        device = there.device
    if batch.there:
        place = next(iter(tensors.values())).device
        own = {key: tensor.to(place) for key, tensor in batch.there.items()}
        tensors = {**tensors, **(own if cast is None else cast(own))}
        tensors = {key: tensors[key] for key in batch.leaves.keys if key in tensors}
    td: TensorDictBase = to_tensordict(tensors, joined.shape, device, batch.leaves.shapes)
    if parcel := batch.leaves.parcel(joined.extras):
        td = with_extras(td, parcel)  # those of tensors follow to its device
    return td if device is None or batch.told is not None else td.clear_device_()


def rollouts_of(td: TensorDictBase, batch: Batch) -> Iterator[tuple[int, int, TensorDictBase]]:
    """The rollouts in a batch: worker, which of its processes, and its frames, [T] or [*P, T]."""
    workers, how = list(batch.frames_of), batch.joined.how
    if how is None:
        parts: Iterable[TensorDictBase] = [td]
    elif how == "stack":
        parts = td.unbind(0)
    else:
        parts = td.split(list(batch.joined.parts), td.ndim - 1 if how == -1 else 0)
    for worker, part in zip(workers, parts, strict=True):
        sources = batch.joined.sources.get(worker, (0,))
        if len(sources) == 1:
            yield worker, sources[0], part
            continue
        steps = part.shape[-1] // len(sources)
        for source, own in zip(sources, part.split(steps, part.ndim - 1), strict=True):
            yield worker, source, own


def finished(
    td: TensorDictBase, options: StreamOptions, host: Mapping[Key, torch.Tensor]
) -> TensorDictBase:
    """What the caller gets: split, without ids where they are not wanted, processed.

    Args:
        host: leaves of the batch by key, as far as they are on the host, where trajectories are
            looked for.
    """
    if options.split_trajs and not options.trajs_per_batch:
        td, _ = split_with_plan(td, "padded", signals=host)
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
