"""From nothing to the first batch: processes of this machine, started and ended again.

One frame here is one collector: made, its first batch read, shut down. The program's own imports
are done, and each side has had a collector before, so that pycollect's template is there.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks import workloads
from benchmarks.race import Side

PEER = "TorchRL"
SPAWN = "pycollect, spawn"
STEPS = 100


def ours(workers: int, start_method: str = "forkserver") -> Iterator[int]:
    """MultiSyncDataCollector of pycollect."""
    from pycollect import MultiSyncDataCollector

    def make() -> Any:
        return MultiSyncDataCollector(
            [workloads.pendulum] * workers,
            workloads.linear_policy(),
            frames_per_batch=STEPS * workers,
            total_frames=workloads.FOREVER,
            start_method=start_method,
        )

    return _starts(make)


def torchrl(workers: int) -> Iterator[int]:
    """MultiSyncCollector of TorchRL."""
    from torchrl.collectors import MultiSyncCollector

    def make() -> Any:
        return MultiSyncCollector(
            [workloads.for_torchrl(workloads.pendulum)] * workers,
            workloads.linear_policy(),
            frames_per_batch=STEPS * workers,
            total_frames=workloads.FOREVER,
        )

    return _starts(make)


def _starts(make: Callable[[], Any]) -> Iterator[int]:
    while True:
        collector = make()
        try:
            workloads.read(next(iter(collector)))
        finally:
            collector.shutdown()
        yield 1


@pytest.mark.parametrize("workers", [1, pytest.param(8, marks=pytest.mark.full)])
def test_start(compare: Callable[..., None], workers: int) -> None:
    """One environment per worker."""
    work = {"workers": workers}
    compare(
        f"start, first batch and end of {workers} processes",
        [
            Side("pycollect", ours, work),
            Side(SPAWN, ours, {**work, "start_method": "spawn"}, slow=True),
            Side(PEER, torchrl, work, needs="torchrl", slow=True, spawns=True),
        ],
        frame_bytes=0,
        wanted={SPAWN: 4, PEER: 4},
    )
