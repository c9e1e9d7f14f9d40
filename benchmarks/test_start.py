"""From nothing to the first batch: processes of this machine, started and ended again.

One frame here is one collector: made, its first batch read, shut down. The program's own imports
are done, and each side has had a collector before, so that pycollect's template is there.
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
    """Make a collector, read its first batch and shut it down, again and again."""
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
    """One environment per worker."""
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
