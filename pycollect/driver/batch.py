"""A batch on its way to the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pycollect._core import Slab
from pycollect.data.devices import CPU
from pycollect.data.extras import Extras
from pycollect.data.frame import BatchLeaves
from pycollect.data.layout import Key
from pycollect.worker.report import Episode


@dataclass(frozen=True)
class Batch:
    """A batch of rollouts before delivery.

    Attributes:
        slab: Memory of the tensors.
        tensors: Tensors in the slab, by key.
        shape: Batch dimensions, time last.
        leaves: Entries of a frame.
        frames_of: Number of collected frames of each worker, in the order of their rows.
            Uncollected cells are not counted.
        versions: Oldest policy version that acted in the rollout of each worker.
        episodes: Episodes that ended in this batch.
        extras: Extras in the shape of the batch, or ``None``.
        device: Device to deliver the batch to.
        reported_device: Value of ``td.device``; ``None`` if no device was requested.
        on_device: Tensors on the environments' device, outside the slab, by key.
        joined: How rollouts are joined: "stack", 0 or -1; ``None`` for a single rollout.
        parts: If rollouts are concatenated, the size of each rollout along that dimension.
        sources: For workers with several processes, the processes that follow each other along time
            in the worker's rollout, by worker.
        stacked: Whether the first dimension of each worker's rollout is its processes.
    """

    slab: Slab
    tensors: dict[Key, torch.Tensor]
    shape: Sequence[int]
    leaves: BatchLeaves
    frames_of: Mapping[int, int] = field(default_factory=dict)
    versions: Mapping[int, int] = field(default_factory=dict)
    episodes: Sequence[Episode] = ()
    extras: Extras | None = None
    device: torch.device = CPU
    reported_device: torch.device | None = None
    on_device: Mapping[Key, torch.Tensor] = field(default_factory=dict)
    joined: str | int | None = None
    parts: Sequence[int] = ()
    sources: Mapping[int, Sequence[int]] = field(default_factory=dict)
    stacked: bool = False
