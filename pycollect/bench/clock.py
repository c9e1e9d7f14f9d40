"""How long something takes, on the host and on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def median_seconds(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """The median duration of a call that is waited for.

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


def queued_seconds(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """The duration of a call where calls follow each other and only the last is waited for.

    Args:
        work: is called once before.
        seconds: how long to measure. It is five runs of at least two calls; their median counts.
        device: which is waited for at the end of each run.
    """
    work()
    calls = max(2, min(1000, round(seconds / 5 / max(seconds_of(work, device), 1e-9))))

    def run() -> None:
        for _ in range(calls):
            work()

    return statistics.median(seconds_of(run, device) for _ in range(5)) / calls


def device_seconds(work: Callable[[], object], calls: int = 20) -> float | None:
    """The duration of a call on the current CUDA device alone.

    The device is kept busy until all calls are queued, so that the host's time is not in it.

    Args:
        work: is called twice before.
        calls: that are queued.

    Returns:
        Seconds; None where the host took longer to queue them than the device was kept busy.
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

    On the CPU the host itself does it, at once.

    Args:
        milliseconds: of one call.
    """

    def __init__(self, device: torch.device, milliseconds: float) -> None:
        size = 2048 if device.type == "cuda" else 256
        self._matrix = torch.randn(size, size, device=device) / size
        self._times = 20
        one = queued_seconds(self, 0.05, device) / self._times
        self._times = max(1, round(milliseconds / 1e3 / max(one, 1e-6)))

    def __call__(self) -> None:
        """One step of learning."""
        result = self._matrix
        for _ in range(self._times):
            result = result @ self._matrix
