"""Whole collectors of frames of 84x84x4 bytes, to the CPU and to a device; TorchRL's, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from tensordict.nn import TensorDictModule

from pycollect import MultiSyncDataCollector, RayCollector, SyncDataCollector
from pycollect.bench.clock import Learner, median_seconds
from pycollect.bench.copies import MEMORY_COPY, PINNED_COPY, Sizes
from pycollect.bench.environment import FreeFrames, Still
from pycollect.bench.rows import Row, missing
from pycollect.devices import CPU

_WORKERS = 2
_Make = Callable[..., Any]


def policy() -> TensorDictModule:
    """A policy that is given the frame and does nothing with it."""
    return TensorDictModule(Still(), in_keys=["observation"], out_keys=["action"])


def ours(way: str, frames: int, place: torch.device) -> Any:
    """A collector of this package.

    Args:
        way: "in process", "processes" or "Ray".
    """
    arguments: dict[str, Any] = {"frames_per_batch": frames, "storing_device": place}
    if way == "in process":
        return SyncDataCollector(FreeFrames, policy(), **arguments)
    arguments["prefetch"] = 1
    if way == "processes":
        return MultiSyncDataCollector([FreeFrames] * _WORKERS, policy(), **arguments)
    return RayCollector([FreeFrames] * _WORKERS, policy(), sync=True, **arguments)


def torchrls(way: str, frames: int, place: torch.device) -> Any:
    """TorchRL's collector, whose batches go to the device by ``.to``."""
    make = partial(wrapped, FreeFrames)
    arguments: dict[str, Any] = {"frames_per_batch": frames, "total_frames": 10**12}
    if way == "in process":
        return torchrls_single()(make, policy(), **arguments)
    return torchrls_multi()([make] * _WORKERS, policy(), **arguments)


def torchrls_single() -> Any:
    """TorchRL's collector in this process, by its name since 0.13 or that before."""
    from torchrl import collectors

    return getattr(collectors, "Collector", None) or collectors.SyncDataCollector


def torchrls_multi() -> Any:
    """TorchRL's collector of processes, by its name since 0.13 or that before."""
    from torchrl import collectors

    return getattr(collectors, "MultiSyncCollector", None) or collectors.MultiSyncDataCollector


def wrapped(make: Callable[[], Any]) -> Any:
    """A Gymnasium environment as TorchRL wants it."""
    from torchrl.envs import GymWrapper

    return GymWrapper(make())


def collector_rows(
    sizes: Sizes, megabytes: float, device: torch.device, why_not: str, *, quick: bool
) -> list[Row]:
    """A row for each way to collect, to the CPU and to the device, with a learner there."""
    rows = []
    cases: list[tuple[str, str, _Make, str]] = [
        ("pycollect", way, ours, lacks("ray") if way == "Ray" else "")
        for way in ("in process", "processes", "Ray")
    ]
    for way in ("in process",) if quick else ("in process", "processes"):
        cases.append(("TorchRL", way, torchrls, lacks("torchrl")))
    for side, way, make, lacking in cases:
        for place in (CPU, device):
            name = f"{side}, {way}, to the {'CPU' if place == CPU else 'device'}"
            reason = lacking or (why_not if place != CPU else "")
            if reason:
                rows.append(missing(name, reason))
                continue
            limit = MEMORY_COPY if place == CPU else PINNED_COPY
            row = _measured(name, partial(make, way), sizes, megabytes, place, limit)
            rows.append(replace(row, peer=name.replace(side, "TorchRL")) if make is ours else row)
    return rows


def _measured(
    name: str, make: _Make, sizes: Sizes, megabytes: float, place: torch.device, limit: str
) -> Row:
    learner = Learner(place, 1.0) if place != CPU else None
    collector = make(sizes.frames, place)
    try:
        stream = iter(collector)

        def batch() -> None:
            td = next(stream)
            if place != CPU:
                td = td.to(place)  # ours is there
            td["observation"][..., 0, 0, :].sum()
            if learner is not None:
                learner()

        seconds = median_seconds(batch, sizes.seconds, place)
    finally:
        collector.shutdown()
    note = "" if learner is None else "with a learner of 1 ms"
    return Row(name, megabytes, seconds, limit=limit, frames=sizes.frames, note=note)


def lacks(module: str) -> str:
    """Why a row cannot be measured; empty where that module is installed."""
    return "" if find_spec(module) is not None else f"{module} is not installed"
