"""The driver's time per batch, from a filled slab to the TensorDict that is delivered.

Counts batches, not frames: lease a slab, make views of its 11 leaves and the nested TensorDict, and
drop all, so that the slab returns to its pool.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.race import Side

STEPS = 2000
AT_ONCE = 200
"""Number of batches between two reads of the clock."""


def ours() -> Iterator[int]:
    """Make views with pycollect."""
    from pycollect._core import Leaf, Placement
    from pycollect.data.frame import BatchLeaves
    from pycollect.data.slabs import make_pool, slab_tensors, to_tensordict

    leaves = BatchLeaves(
        observation=(Leaf(("observation",), "float32", (3,)),),
        outputs=(Leaf(("action",), "float32", (1,)),),
    )
    placement = Placement(leaves.layout(), 1, 1, STEPS)
    assert len(placement.layout.leaves) == 11
    pool = make_pool(placement, 3)
    while True:
        for _ in range(AT_ONCE):
            batch = to_tensordict(slab_tensors(pool.acquire(), [STEPS]), [STEPS])
            del batch
        assert pool.stats().created == 1
        yield AT_ONCE


def numpy_views() -> Iterator[int]:
    """Make views by hand: slices of one block of memory, and TensorDict's public constructor."""
    leaves = [
        (("observation",), np.float32, 3),
        (("action",), np.float32, 1),
        (("done",), np.bool_, 1),
        (("terminated",), np.bool_, 1),
        (("truncated",), np.bool_, 1),
        (("next", "observation"), np.float32, 3),
        (("next", "reward"), np.float32, 1),
        (("next", "done"), np.bool_, 1),
        (("next", "terminated"), np.bool_, 1),
        (("next", "truncated"), np.bool_, 1),
        (("collector", "traj_ids"), np.int64, 0),
    ]
    shapes = [(STEPS, width) if width else (STEPS,) for _, _, width in leaves]
    sizes = [
        int(np.prod(shape)) * np.dtype(dtype).itemsize
        for shape, (_, dtype, _) in zip(shapes, leaves, strict=True)
    ]
    offsets = np.cumsum([0] + [-(-size // 64) * 64 for size in sizes]).tolist()
    memory = np.zeros(offsets[-1], np.uint8)
    while True:
        for _ in range(AT_ONCE):
            nested: dict = {"next": {}, "collector": {}}
            for (key, dtype, _), shape, offset in zip(leaves, shapes, offsets, strict=False):
                view = torch.from_numpy(np.ndarray(shape, dtype, memory, offset))
                (nested[key[0]] if len(key) == 2 else nested)[key[-1]] = view
            batch = TensorDict(nested, batch_size=[STEPS], names=["time"])
            del batch
        yield AT_ONCE


def test_slab_to_tensordict(compare: Callable[..., None]) -> None:
    """The goal is 15 us. By hand it takes about 44 us, hence the wanted ratio."""
    compare(
        "slab to TensorDict, batches (wanted: 15 us)",
        [
            Side("pycollect", ours),
            Side("numpy views, public constructor", numpy_views),
        ],
        frame_bytes=0,
        wanted={"numpy views, public constructor": 3},
    )
