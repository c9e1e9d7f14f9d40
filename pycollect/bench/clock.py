"""Clocks for work on the host and on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def median_seconds(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Return the median duration of a call, including the wait for the device.

    One call warms up; then at least three are timed, for at least that many seconds.
    """
    work()
    return statistics.median(durations(lambda: seconds_of(work, device), seconds))


def queued_seconds(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Return the duration of a call if calls are queued and only the last one is awaited.

    Two calls warm up. The median of five runs counts, each of at least two calls.
    """
    work()
    calls = max(2, min(1000, round(seconds / 5 / max(seconds_of(work, device), 1e-9))))

    def run() -> None:
        for _ in range(calls):
            work()

    return statistics.median(seconds_of(run, device) for _ in range(5)) / calls


def device_seconds(work: Callable[[], object], calls: int = 20) -> float | None:
    """Return the duration of a call on the current CUDA device, without the host's time.

    The device is kept busy until all calls are queued; ``None`` if the host queued them too slowly.
    Two calls warm up.
    """
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    host = time.perf_counter() - start
    cuda: Any = torch.cuda
    first, last = (cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 2e9 * (4 * calls * host + 0.02)  # of a clock of at most 2 GHz
    torch.cuda.synchronize()
    cuda._sleep(int(cycles))
    first.record()
    for _ in range(calls):
        work()
    last.record()
    was_in_time = not first.query()
    torch.cuda.synchronize()
    took: float = first.elapsed_time(last)
    return 1e-3 * took / calls if was_in_time else None


def median_host_seconds(
    work: Callable[[], object],
    seconds: float,
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Return the median time a call takes on the host; the device is synchronized between calls.

    One call warms up; then at least three are timed. `before` is called before each one, not timed.
    """
    wait = _waiting(device)

    def once() -> float:
        before()
        start = time.perf_counter()
        work()
        took = time.perf_counter() - start
        wait()
        return took

    work()
    wait()
    return statistics.median(durations(once, seconds))


def durations(once: Callable[[], float], seconds: float) -> list[float]:
    """Return at least three durations, measured for at least that time."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        times.append(once())
    return times


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the duration of one call, including the wait for the device.

    The result of the call is freed after the clock has stopped.
    """
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
    """Queue matrix products that take about that long; on the CPU, they are computed at once."""

    def __init__(self, device: torch.device, milliseconds: float) -> None:
        size = 2048 if device.type == "cuda" else 256
        self._matrix = torch.randn(size, size, device=device) / size
        self._times = 20
        one = queued_seconds(self, 0.05, device) / self._times
        self._times = max(1, round(milliseconds / 1e3 / max(one, 1e-6)))

    def __call__(self) -> None:
        result = self._matrix
        for _ in range(self._times):
            result = result @ self._matrix
