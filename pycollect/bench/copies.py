"""The steps that move a batch to a device, compared with plain copies; their costs for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import median

import numpy as np
import torch

from pycollect import cuda
from pycollect._core import DeviceGather, Memory, Placement, Registration, Slab, place_rollout
from pycollect.bench.clock import (
    Learner,
    device_seconds,
    median_host_seconds,
    median_seconds,
    queued_seconds,
    seconds_of,
)
from pycollect.bench.report import Row, missing
from pycollect.bench.sides import FreeFrames, Still
from pycollect.data.cast import scaled
from pycollect.data.devices import CPU, StreamAccelerator, accelerator
from pycollect.data.layout import Key
from pycollect.data.slabs import make_pool, make_shared_pool, slab_tensors
from pycollect.data.upload import Allocate, DeviceUploader
from pycollect.worker.options import WorkerOptions
from pycollect.worker.worker import Worker

MEMORY_COPY, PINNED_COPY, DEVICE_COPY = "memory copy", "copy, pinned", "device memory copy"
_OF_TORCH, _SHARED = "upload, by torch", "upload, shared slab"
_LOAD = "first load of the kernel"
_UPLOAD, _HAND_OVER = "upload, host's time", "hand-over to a stream, host's time"
_REGISTERED, _PINNED = "registering shared memory", "taking pinned memory"
_MEGABYTES = (64, 256, 1024)
_WORKERS = 2
LEARNERS = (1, 2, 8)
"""Durations of the learner's work, in copies."""
_ON_A_DEVICE = (
    PINNED_COPY,
    "copy, pageable",
    DEVICE_COPY,
    "assembly, pinned",
    "upload",
    _OF_TORCH,
    _SHARED,
    "cast",
    *(f"upload beside a learner of {share:g} copies" for share in LEARNERS),
)


@dataclass(frozen=True)
class Sizes:
    """Amounts of data to move, and the duration of a measurement."""

    frames: int  # number of frames in a batch, each 84x84x4 bytes, at the root and under "next"
    split_frames: int  # number of frames of 128 bytes that are split
    gathered: float  # bytes of a leaf that the kernel gathers
    seconds: float


class Material:
    """A rollout as a worker writes it, and the placement of a batch of two such rollouts."""

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
        """Size of a batch in 10^6 bytes."""
        return self.batch.bytes / 1e6


def host_rows(sizes: Sizes, material: Material) -> list[Row]:
    """Return the rows that need no device."""
    source = np.ones(material.batch.bytes, np.uint8)
    target = np.ones(material.batch.bytes, np.uint8)
    copy = median_seconds(lambda: np.copyto(target, source), sizes.seconds, CPU)
    return [
        Row(MEMORY_COPY, material.megabytes, copy, note="one thread"),
        _assembly("assembly", sizes, material, None),
        _cast("cast, CPU", sizes, material, CPU),
    ]


def device_rows(sizes: Sizes, material: Material, device: torch.device, why_not: str) -> list[Row]:
    """Return the rows that need a device; without one, they have no figures."""
    if why_not:
        return [missing(name, why_not) for name in _ON_A_DEVICE]
    way = DeviceUploader(accelerator(device))
    copies = Copies(sizes, material, device)
    return [
        *copies.rows(),
        _assembly("assembly, pinned", sizes, material, way.allocate),
        copies.upload("upload", way, "by the core" if cuda.is_torchs() else "by torch"),
        copies.upload(_OF_TORCH, DeviceUploader(StreamAccelerator(device))),
        copies.upload_of_shared(way),
        _cast("cast", sizes, material, device),
        *(_overlap(sizes, material, device, share) for share in LEARNERS),
    ]


def _assembly(name: str, sizes: Sizes, material: Material, allocate: Allocate | None) -> Row:
    """Rollouts of two workers into one slab, as they come from another machine."""
    slab = make_pool(material.batch, 2, allocate).acquire()

    def work() -> None:
        for row in range(_WORKERS):
            place_rollout(slab, row, material.rollout, material.one)

    seconds = median_seconds(work, sizes.seconds, CPU)
    return Row(name, material.megabytes, seconds, limit=MEMORY_COPY)


class Copies:
    """Uploads of batches, compared with a plain copy of the same size.

    Both are timed twice: queued copies show the rate of the bus, and awaited ones the overhead of
    the host.
    """

    def __init__(self, sizes: Sizes, material: Material, device: torch.device) -> None:
        self._sizes, self._material, self._device = sizes, material, device
        size = material.batch.bytes
        self._there = torch.empty(size, dtype=torch.uint8, device=device)
        pinned = accelerator(device).pinned([size], torch.uint8).fill_(1)
        self._queued, self._waited = self._both(
            lambda: self._there.copy_(pinned, non_blocking=True)
        )

    def _both(self, work: Callable[[], object]) -> tuple[float, float]:
        seconds = self._sizes.seconds
        return (
            queued_seconds(work, seconds, self._device),
            median_seconds(work, seconds / 2, self._device),
        )

    def rows(self) -> list[Row]:
        """Return the rows of plain copies."""
        megabytes = self._material.megabytes
        pageable = torch.ones(self._material.batch.bytes, dtype=torch.uint8)
        other = torch.empty_like(self._there)
        slow = queued_seconds(
            lambda: self._there.copy_(pageable), self._sizes.seconds, self._device
        )
        inside = device_seconds(lambda: other.copy_(self._there))
        return [
            Row(PINNED_COPY, megabytes, self._queued),
            Row("copy, pageable", megabytes, slow, limit=PINNED_COPY),
            Row(DEVICE_COPY, 2 * megabytes, inside, note="bytes read and written; device time"),
        ]

    def upload(self, name: str, way: DeviceUploader, note: str = "") -> Row:
        """Measure the upload of a slab in memory that the uploader has allocated."""
        slab = make_pool(self._material.batch, 1, way.allocate).acquire()
        return self._sent(name, slab, way, note)

    def upload_of_shared(self, way: DeviceUploader) -> Row:
        """Measure the upload of a slab in shared memory, as worker processes write it."""
        pool = make_shared_pool(self._material.batch, 1, 0)
        if not way.pin(pool):
            return missing(_SHARED, "shared memory cannot be pinned")
        slab = pool.acquire()
        assert slab is not None
        return self._sent(_SHARED, slab, way, "registered with the driver")

    def _sent(self, name: str, slab: Slab, way: DeviceUploader, note: str) -> Row:
        tensors = _tensors(slab)
        queued, waited = self._both(lambda: way.upload(slab, tensors))
        way.close()
        more = f"{1e6 * (waited - self._waited):.0f} us more than a copy if each is waited for"
        note = f"{note}; {more}" if note else more
        return Row(name, slab.bytes / 1e6, queued, limit=PINNED_COPY, note=note)


def _overlap(sizes: Sizes, material: Material, device: torch.device, share: float) -> Row:
    """Measure uploads during a learner's work that takes `share` times as long as a copy."""
    batches = DeviceUploader(accelerator(device))
    pool = make_pool(material.batch, 3, batches.allocate)

    def upload() -> object:
        slab = pool.acquire()
        return batches.upload(slab, _tensors(slab))

    copying = queued_seconds(upload, sizes.seconds, device)
    learner = Learner(device, 1e3 * share * copying)

    def both(rounds: int) -> float:
        def run() -> None:
            for _ in range(rounds):
                upload()
                learner()

        return seconds_of(run, device)

    # The difference of a long and a short run excludes the start and the end of a run.
    few, many = 4, 24
    both(few)
    times = [(both(few), both(many)) for _ in range(5)]
    together = median((long - short) / (many - few) for short, long in times)
    learning = queued_seconds(learner, sizes.seconds, device)
    batches.close()
    hidden = (copying + learning - together) / min(copying, learning)
    return Row(
        f"upload beside a learner of {share:g} copies",
        material.megabytes,
        together,
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


def host_cost_rows(sizes: Sizes, device: torch.device, why_not: str) -> list[Row]:
    """Return the rows, without figures if the device is missing or the core has no CUDA."""
    reason = why_not or ("" if cuda.is_torchs() else cuda.why_not())
    if reason:
        names = [f"{name}, {size} MB" for name in (_REGISTERED, _PINNED) for size in _MEGABYTES]
        return [missing(name, reason) for name in (_LOAD, _UPLOAD, _HAND_OVER, *names)]
    return [
        _load(device),
        _upload(sizes, device),
        _hand_over(sizes, device),
        *chain.from_iterable(_memory(size, device) for size in _MEGABYTES),
    ]


def _load(device: torch.device) -> Row:
    """Measure the first load of the kernel; call it before anything else loads it."""
    torch.empty(1, device=device)
    seconds = seconds_of(lambda: DeviceGather(device.index), device)
    note = "compiled by the driver unless cached; CUDA_CACHE_DISABLE=1 disables the cache"
    return Row(_LOAD, seconds=seconds, note=note)


def _upload(sizes: Sizes, device: torch.device) -> Row:
    uploader = cuda.Uploader(device)
    source = accelerator(device).pinned([4 << 20], torch.uint8)
    target = uploader.empty(source.shape, source.dtype)
    seconds = median_host_seconds(lambda: uploader.upload(source, target), sizes.seconds, device)
    uploader.wait()
    return Row(_UPLOAD, seconds=seconds, note="of a tensor of 4 MiB")


def _hand_over(sizes: Sizes, device: torch.device) -> Row:
    way = accelerator(device)
    there = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    ready = way.mark()
    seconds = median_host_seconds(lambda: way.hand_over([there], ready), sizes.seconds, device)
    return Row(_HAND_OVER, seconds=seconds, note="a wait for an event, record_stream of one block")


def _memory(size: int, device: torch.device) -> Iterator[Row]:
    """Yield the seconds of one allocation or registration, and its rate."""
    memory = Memory.share(size << 20)
    memory.array().fill(1)  # map the pages, so that their clearing is not measured
    works: dict[str, Callable[[], object]] = {
        _REGISTERED: lambda: Registration(memory, device.index),
        _PINNED: lambda: accelerator(device).slab_memory(size << 20),
    }
    for name, work in works.items():
        seconds = seconds_of(work, CPU)
        note = f"{1e3 * seconds / size:.3g} ms per MB"
        yield Row(f"{name}, {size} MB", (size << 20) / 1e6, seconds, note=note)
