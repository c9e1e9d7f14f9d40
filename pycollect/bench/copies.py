"""The single steps of a batch's way to a device, beside plain copies of as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from pycollect import cuda
from pycollect._core import Placement, Slab, place_rollout
from pycollect.batch.cast import scaled
from pycollect.batch.layout import Key
from pycollect.batch.slab_views import make_pool, make_shared_pool, slab_tensors
from pycollect.batch.upload import Allocate, DeviceUploader
from pycollect.bench.clock import Learner, median_seconds
from pycollect.bench.environment import FreeFrames, Still
from pycollect.bench.rows import Row, missing
from pycollect.devices import CPU, StreamAccelerator, accelerator
from pycollect.worker.options import WorkerOptions
from pycollect.worker.worker import Worker

MEMORY_COPY, PINNED_COPY, DEVICE_COPY = "memory copy", "copy, pinned", "device memory copy"
_OF_TORCH, _SHARED = "upload, by torch", "upload, shared slab"
_WORKERS = 2
_ON_A_DEVICE = (
    PINNED_COPY,
    "copy, pageable",
    DEVICE_COPY,
    "assembly, pinned",
    "upload",
    _OF_TORCH,
    _SHARED,
    "cast",
    "upload beside a learner",
)


@dataclass(frozen=True)
class Sizes:
    """How much is moved, and for how long.

    Attributes:
        frames: in a batch of frames of 84x84x4 bytes, root and next.
        split_frames: frames of 128 bytes that are split.
        gathered: bytes of a leaf that the kernel alone gathers.
        seconds: that each case is measured.
    """

    frames: int
    split_frames: int
    gathered: float
    seconds: float


class Material:
    """A rollout as a worker writes it, and the form of a batch of two such.

    Attributes:
        one: the rollout's placement.
        rollout: its bytes.
        batch: the batch's placement.
    """

    def __init__(self, frames: int) -> None:
        worker = Worker(0, FreeFrames, None, Still(), WorkerOptions(frames=frames // _WORKERS))
        self.one = worker.placement
        slab = make_pool(self.one, 1).acquire()
        worker.collect(slab, 0, 0)
        worker.close()
        self.rollout = slab.array()
        self.batch = Placement(self.one.layout, _WORKERS, 1, self.one.steps)

    @property
    def megabytes(self) -> float:
        """Of a batch."""
        return self.batch.bytes / 1e6


def host_rows(sizes: Sizes, material: Material) -> list[Row]:
    """What needs no device."""
    source = np.ones(material.batch.bytes, np.uint8)
    target = np.ones(material.batch.bytes, np.uint8)
    copy = median_seconds(lambda: np.copyto(target, source), sizes.seconds, CPU)
    return [
        Row(MEMORY_COPY, material.megabytes, copy, note="one thread"),
        _assembly("assembly", sizes, material, None),
        _cast("cast, CPU", sizes, material, CPU),
    ]


def device_rows(sizes: Sizes, material: Material, device: torch.device, why_not: str) -> list[Row]:
    """What needs a device; rows without figures where there is none."""
    if why_not:
        return [missing(name, why_not) for name in _ON_A_DEVICE]
    way = DeviceUploader(accelerator(device))
    return [
        *_copies(sizes, material, device),
        _assembly("assembly, pinned", sizes, material, way.allocate),
        _upload("upload", sizes, material, way, "by the core" if cuda.is_torchs() else "by torch"),
        _upload(_OF_TORCH, sizes, material, DeviceUploader(StreamAccelerator(device))),
        _upload_of_shared(sizes, material, way),
        _cast("cast", sizes, material, device),
        _overlap(sizes, material, device),
    ]


def _copies(sizes: Sizes, material: Material, device: torch.device) -> list[Row]:
    size = material.batch.bytes
    there = torch.empty(size, dtype=torch.uint8, device=device)
    other = torch.empty_like(there)
    pageable = torch.ones(size, dtype=torch.uint8)
    pinned = accelerator(device).pinned([size], torch.uint8).fill_(1)

    def seconds(work: Callable[[], object]) -> float:
        return median_seconds(work, sizes.seconds, device)

    megabytes = material.megabytes
    fast = seconds(lambda: there.copy_(pinned, non_blocking=True))
    slow = seconds(lambda: there.copy_(pageable))
    inside = seconds(lambda: other.copy_(there))
    return [
        Row(PINNED_COPY, megabytes, fast),
        Row("copy, pageable", megabytes, slow, limit=PINNED_COPY),
        Row(DEVICE_COPY, 2 * megabytes, inside, note="bytes read and written"),
    ]


def _assembly(name: str, sizes: Sizes, material: Material, allocate: Allocate | None) -> Row:
    """Rollouts of two workers into one slab, as they come from another machine."""
    slab = make_pool(material.batch, 2, allocate).acquire()

    def work() -> None:
        for row in range(_WORKERS):
            place_rollout(slab, row, material.rollout, material.one)

    seconds = median_seconds(work, sizes.seconds, CPU)
    return Row(name, material.megabytes, seconds, limit=MEMORY_COPY)


def _upload(
    name: str, sizes: Sizes, material: Material, way: DeviceUploader, note: str = ""
) -> Row:
    """A batch that lies in memory of the way's own, as collectors send it."""
    return _sent(name, sizes, make_pool(material.batch, 1, way.allocate).acquire(), way, note)


def _upload_of_shared(sizes: Sizes, material: Material, way: DeviceUploader) -> Row:
    """A batch that lies where worker processes wrote it."""
    pool = make_shared_pool(material.batch, 1, 0)
    if not way.pin(pool):
        return missing(_SHARED, "shared memory cannot be pinned")
    slab = pool.acquire()
    assert slab is not None
    return _sent(_SHARED, sizes, slab, way, "registered with the driver")


def _sent(name: str, sizes: Sizes, slab: Slab, way: DeviceUploader, note: str) -> Row:
    tensors = _tensors(slab)
    seconds = median_seconds(lambda: way.upload(slab, tensors), sizes.seconds, way.device)
    way.close()
    return Row(name, slab.bytes / 1e6, seconds, limit=PINNED_COPY, note=note)


def _overlap(sizes: Sizes, material: Material, device: torch.device) -> Row:
    """Batches that are copied while a learner works that takes as long as the copy."""
    batches = DeviceUploader(accelerator(device))
    pool = make_pool(material.batch, 3, batches.allocate)

    def upload() -> None:
        slab = pool.acquire()
        batches.upload(slab, _tensors(slab))

    copying = median_seconds(upload, sizes.seconds, device)
    learner = Learner(device, 1e3 * copying)
    learning = median_seconds(learner, sizes.seconds, device)
    rounds = 8

    def both() -> None:
        for _ in range(rounds):
            upload()
            learner()

    together = median_seconds(both, sizes.seconds, device)
    batches.close()
    # The first copy has nothing to hide behind.
    spared = rounds * (copying + learning) - together
    hidden = min(1.0, max(0.0, spared / ((rounds - 1) * min(copying, learning))))
    return Row(
        "upload beside a learner",
        material.megabytes,
        together / rounds,
        hidden=hidden,
        note=f"learner {1e3 * learning:.3g} ms, copy {1e3 * copying:.3g} ms",
    )


def _cast(name: str, sizes: Sizes, material: Material, device: torch.device) -> Row:
    frames = torch.ones(material.batch.bytes, dtype=torch.uint8, device=device)
    work = partial(scaled, frames, torch.bfloat16, 1 / 255)
    seconds = median_seconds(work, sizes.seconds, device)
    return Row(name, material.megabytes, seconds, note="bytes to bfloat16 / 255")


def _tensors(slab: Slab) -> dict[Key, torch.Tensor]:
    place = slab.placement
    return slab_tensors(slab, [place.workers, place.envs, place.steps])
