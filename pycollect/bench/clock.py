"""How long something takes, on the host and on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def median_seconds(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """The median duration of a call, device and all.

    Args:
        work: is called once before.
        seconds: how long to measure, at least three calls.
        device: which is waited for before and after each call.
    """
    work()
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while len(durations) < 3 or time.perf_counter() < end:
        durations.append(seconds_of(work, device))
    return statistics.median(durations)


def median_host_seconds(
    work: Callable[[], object],
    seconds: float,
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> float:
    """The median time that a call holds the host up; the device is waited for between calls.

    Args:
        work: is called once before.
        seconds: how long to measure, at least three calls.
        before: what the device is given right before each call, which is not counted.
    """
    wait = _waiting(device)
    work()
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while len(durations) < 3 or time.perf_counter() < end:
        wait()
        before()
        start = time.perf_counter()
        work()
        durations.append(time.perf_counter() - start)
    wait()
    return statistics.median(durations)


def kernel_seconds(work: Callable[[], object], kernel: str, calls: int = 20) -> float | None:
    """The median duration of that kernel on the device, by torch's profiler; None: not seen."""
    work()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
    events: Any = profile.events()
    seen = [1e-6 * own.time_range.elapsed_us() for own in events if own.name == kernel]
    return statistics.median(seen) if seen else None


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """The duration of one call, device and all; what it returns is given back afterwards."""
    wait = _waiting(device)
    wait()
    start = time.perf_counter()
    _held = work()
    wait()
    return time.perf_counter() - start


def _waiting(device: torch.device) -> Callable[[], None]:
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


class Learner:
    """Work for a device of about a given length, which holds the host up no longer than to ask.

    On the CPU it is made by the host, at once.

    Args:
        milliseconds: of one call.
    """

    def __init__(self, device: torch.device, milliseconds: float) -> None:
        size = 2048 if device.type == "cuda" else 256
        self._matrix = torch.randn(size, size, device=device) / size
        self._times = 1
        one = max(median_seconds(self, 0.05, device), 1e-6)
        self._times = max(1, round(milliseconds / 1e3 / one))

    def __call__(self) -> None:
        """One step of learning."""
        result = self._matrix
        for _ in range(self._times):
            result = result @ self._matrix
