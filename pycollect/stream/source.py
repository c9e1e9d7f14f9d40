"""A batch on its way to the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pycollect._core import Slab
from pycollect.batch.extras import Extras
from pycollect.batch.frame import BatchLeaves
from pycollect.batch.layout import Key
from pycollect.devices import CPU
from pycollect.worker.report import Episode


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
