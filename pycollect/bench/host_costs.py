"""Host time of a batch's transfer to a device, and the one-time cost of its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch

from pycollect import cuda
from pycollect._core import DeviceGather, Memory, Registration
from pycollect.bench.clock import median_host_seconds, seconds_of
from pycollect.bench.copies import Sizes
from pycollect.bench.rows import Row, missing
from pycollect.devices import CPU, accelerator

_LOAD = "first load of the kernel"
_UPLOAD, _HAND_OVER = "upload, host's time", "hand-over to a stream, host's time"
_REGISTERED, _PINNED = "registering shared memory", "taking pinned memory"
_MEGABYTES = (64, 256, 1024)


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
