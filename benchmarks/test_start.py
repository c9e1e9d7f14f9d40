"""The time to the first batch: worker processes of this machine, started and ended repeatedly.

Counts collectors instead of frames: make one, read its first batch, shut it down. The program has
finished its own imports. Each side had a collector before, so pycollect's fork server is running.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from benchmarks import workloads
from benchmarks.race import Side
from pycollect.bench.sides import ours, torchrls

PEER = "TorchRL"
SPAWN = "pycollect, spawn"
STEPS = 100


def starts(collect: Callable[..., Iterator[int]], workers: int, **arguments: Any) -> Iterator[int]:
    """Make a collector, read its first batch and shut it down, repeatedly."""
    while True:
        stream = collect(
            "MultiSyncDataCollector",
            [workloads.pendulum] * workers,
            workloads.linear_policy,
            frames_per_batch=STEPS * workers,
            **arguments,
        )
        with closing(stream):
            next(stream)
        yield 1


@pytest.mark.parametrize("workers", [1, pytest.param(8, marks=pytest.mark.full)])
def test_start(compare: Callable[..., None], workers: int) -> None:
    """Compare collectors with one environment per worker."""
    mine = {"collect": ours, "workers": workers}
    spawn, theirs = {**mine, "start_method": "spawn"}, {**mine, "collect": torchrls}
    compare(
        f"start, first batch and end of {workers} processes",
        [
            Side("pycollect", starts, {**mine, "start_method": "forkserver"}),
            Side(SPAWN, starts, spawn, slow=True),
            Side(PEER, starts, theirs, needs="torchrl", slow=True, spawns=True),
        ],
        frame_bytes=0,
        wanted={SPAWN: 4, PEER: 4},
    )
