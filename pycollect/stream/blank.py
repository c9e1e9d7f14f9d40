"""A batch in which nothing happened yet."""

from __future__ import annotations

from math import prod

import torch

from pycollect._core import Slab
from pycollect.batch.extras import cells_of
from pycollect.batch.layout import torch_dtype
from pycollect.batch.slab_views import slab_tensors
from pycollect.stream.source import Batch
from pycollect.worker.worker import Worker


def blank_batch(
    worker: Worker, slab: Slab, place: torch.device, reported: torch.device | None
) -> Batch:
    """A batch of zeros as this worker's are.

    Its extras are absent, and with `set_truncated` the flags of its last frames are set.

    Args:
        place, reported: as a Batch's.
    """
    shape = worker.batch_shape
    tensors = slab_tensors(slab, shape, worker.slab_leaves.keys)
    for tensor in tensors.values():
        tensor.zero_()
    kept = worker.slab_leaves.keys
    on_device = {
        leaf.key: torch.zeros([*shape, *leaf.shape], dtype=torch_dtype(leaf.dtype), device="cpu")
        for leaf in worker.leaves.all
        if leaf.key not in kept and leaf.key in worker.leaves.keys
    }
    if worker.options.set_truncated:
        every = {**tensors, **on_device}
        for key, tensor in every.items():
            knows = key[0] == "next" and (*key[:-1], "truncated") in every
            if knows and key[-1] in ("done", "truncated"):
                tensor.select(len(shape) - 1, -1).fill_(True)
    extras = {
        extra.key: cells_of([extra.absent() for _ in range(prod(shape))], shape)
        for extra in worker.leaves.extras
    }
    return Batch(
        slab,
        tensors,
        shape,
        worker.leaves,
        extras=extras or None,
        place=place,
        reported=reported,
        on_device=on_device,
    )
