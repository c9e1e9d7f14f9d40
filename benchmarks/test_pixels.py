"""Frames of pixels from two Ray actors: the rate of bytes from the environment to the learner.

The environment costs nothing, so this measures transport. A frame has 56,448 bytes: the pixels
before and after the step. The limit is one thread that copies a batch from memory to memory.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks import workloads
from benchmarks.race import Side
from pycollect.bench.sides import FRAME_BYTES as ONE_FRAME
from pycollect.bench.sides import FreeFrames, ours, torchrls

FRAMES = 1000
ACTORS = 2
LIMIT = "memcpy, 1 thread"
FRAME_BYTES = 2 * ONE_FRAME
PEER = "TorchRL"


def memcpy() -> Iterator[int]:
    """Copy a batch's bytes with one thread, into memory that was touched before."""
    source = np.random.default_rng(0).integers(0, 256, FRAMES * FRAME_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    while True:
        np.copyto(target, source)
        yield FRAMES


def work(policy: str) -> dict[str, Any]:
    """Return the arguments of a collector of two workers, by the policy's name."""
    return {
        "env": [FreeFrames] * ACTORS,
        "policy": workloads.still_policy if policy == "module" else None,
        "read": workloads.read_pixels,
        "frames_per_batch": FRAMES,
    }


def wanted(policy: str) -> dict[str, float]:
    """Return the wanted ratios. A module takes longer than the transport, so it has no limit."""
    return {PEER: 8, LIMIT: 1} if policy == "random" else {PEER: 8}


POLICIES = pytest.mark.parametrize(
    "policy", ["random", pytest.param("module", marks=pytest.mark.full)]
)


@POLICIES
def test_pixels(compare: Callable[..., None], ray_address: str, policy: str) -> None:
    """Compare sync batches with random actions, and with a module that reads each frame."""
    mine, theirs = (
        {"collect": collect, "sync": True, **work(policy)} for collect in (ours, torchrls)
    )
    address = {"ray_address": ray_address}
    compare(
        f"pixels, Ray, {ACTORS} actors, {policy} policy",
        [
            Side("pycollect", workloads.on_ray, mine, **address),
            Side(PEER, workloads.on_ray, theirs, **address, needs="torchrl", spawns=True),
            Side(LIMIT, memcpy),
        ],
        frame_bytes=FRAME_BYTES,
        wanted=wanted(policy),
    )


def recorded() -> Iterator[int]:
    """Write slabs of shared memory in one worker of pycollect, without reading them."""
    from pycollect._core import SharedSlabPool
    from pycollect.worker.options import WorkerOptions
    from pycollect.worker.worker import Worker

    worker = Worker(0, FreeFrames, None, None, WorkerOptions(FRAMES))
    pool = SharedSlabPool(worker.placement, 3, 0)
    while True:
        slab = pool.acquire()
        assert slab is not None
        worker.collect(slab, 0, 0)
        yield FRAMES


def test_pixels_recorded(compare: Callable[..., None]) -> None:
    """Compare the recorder's stores, which bypass the caches, with memcpy."""
    compare(
        "pixels, one process, written into shared slabs",
        [Side("pycollect", recorded), Side(LIMIT, memcpy)],
        frame_bytes=FRAME_BYTES,
        wanted={},
    )
