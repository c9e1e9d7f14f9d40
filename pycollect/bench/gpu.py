"""The measurements of `bench gpu`: its parts, and the host's costs of a transfer to a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

import torch

from pycollect import cuda
from pycollect._core import DeviceGather, Memory, Registration
from pycollect.bench.clock import median_host_seconds, seconds_of
from pycollect.bench.copies import Material, Sizes, device_rows, host_rows
from pycollect.bench.gpu_trajectories import gather_rows, split_rows
from pycollect.bench.pixels import LOOP, PEERS, POLICY, SIDES, side_rows
from pycollect.bench.report import Row, missing
from pycollect.bench.simulator import SIZES as ENVS
from pycollect.bench.simulator import simulator_rows
from pycollect.data.devices import CPU, accelerator, named_device, why_not

SECONDS = 1.0  # of each case
QUICK_SECONDS = 0.1
_LOAD = "first load of the kernel"
_UPLOAD, _HAND_OVER = "upload, host's time", "hand-over to a stream, host's time"
_REGISTERED, _PINNED = "registering shared memory", "taking pinned memory"
_MEGABYTES = (64, 256, 1024)
QUICK_SIDES = ("central", "a policy each", LOOP, POLICY, PEERS[0])


def measure(
    parts: Sequence[str],
    device: str,
    processes: Sequence[int],
    sides: Sequence[str] = (),
    *,
    quick: bool,
) -> Iterator[list[Row]]:
    """Yield the rows of each part as soon as they are measured.

    Rows that need a missing device are marked as not available. A part that fails is reported as a
    row; the next parts are still measured.

    Args:
        parts: Names of the parts, see `cli`.
        device: "cuda:0", ...; on "cpu" only collectors and the host's own rows are measured.
        sides: Keys of `pixels.SIDES` (default: all, or `QUICK_SIDES` if `quick`).

    Raises:
        ValueError: The device or a side does not exist, or a number of processes is below 1.
    """
    place = named_device("--device", device)
    if min(processes) < 1:
        raise ValueError(f"--workers: expected numbers of at least 1, got {min(processes)}")
    for side in sides:
        if side not in SIDES:
            raise ValueError(f"--sides: expected names from {', '.join(SIDES)}; got {side!r}")
    sides = sides or (QUICK_SIDES if quick else tuple(SIDES))
    # More than caches hold: a batch of 260 MB; 128 MB that are split, 256 MB that are gathered.
    sizes = Sizes(4608, 1_000_000, 256e6, QUICK_SECONDS if quick else SECONDS)
    lacking = "the device is the CPU" if place.type == "cpu" else why_not(place)
    for part in parts:
        for rows in _cases(part, sizes, place, lacking, processes, sides):
            yield _rows_of(part, rows)


def _cases(
    part: str,
    sizes: Sizes,
    device: torch.device,
    lacking: str,
    processes: Sequence[int],
    sides: Sequence[str],
) -> list[Callable[[], list[Row]]]:
    """Return the functions that measure a part; each result is shown at once."""
    if part == "collectors" and lacking and device.type != "cpu":
        return [lambda: [missing("collectors", lacking)]]
    if part == "collectors":
        seconds = 2.5 * sizes.seconds
        return [
            partial(side_rows, side, count, seconds, device)
            for count in processes
            for side in sides
        ]
    if part == "steps":
        material = Material(sizes.frames)
        return [
            lambda: host_rows(sizes, material),
            lambda: device_rows(sizes, material, device, lacking),
        ]
    if part == "simulator":
        here = "" if device.type == "cpu" else lacking
        return [partial(simulator_rows, envs, sizes.seconds, device, here) for envs in ENVS]
    one = {"host": host_cost_rows, "splits": split_rows, "gathers": gather_rows}[part]
    return [partial(one, sizes, device, lacking)]


def _rows_of(part: str, measured: Callable[[], list[Row]]) -> list[Row]:
    try:
        return measured()
    except Exception as error:  # the time on such a machine is short
        return [missing(f"{part}, which failed", f"{type(error).__name__}: {error}")]


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
