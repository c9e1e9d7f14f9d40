"""Two ranks of torch.distributed on this machine: in shared memory, by messages and by RPC.

Ranks on the driver's node use the same transport as processes, and should be as fast. Ranks on
other nodes use messages or RPC; here these use the loopback interface, so no network is measured.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from benchmarks import test_pixels, workloads
from benchmarks.race import Side
from pycollect.bench.sides import ours, torchrls

PEER = "TorchRL"
PROCESSES = "MultiSync"
RANKS = 2
STEPS = 200
PENDULUM: dict[str, Any] = {
    "env": [workloads.pendulum] * RANKS,
    "policy": workloads.linear_policy,
    "frames_per_batch": STEPS * RANKS,
}


def elsewhere(**work: Any) -> Iterator[int]:
    """Collect as if the ranks were on another node."""
    stream = ours(**work)
    name = "pycollect.transport.distributed.engine.this_node"
    with mock.patch(name, return_value="another one"):
        frames = next(stream)
    yield frames
    yield from stream


def sides(work: dict[str, Any]) -> list[Side]:
    """Return the sides of both cases."""
    ranks = {**work, "collector": "DistributedDataCollector", "sync": True, "launcher": "mp"}
    return [
        Side("pycollect", ours, ranks),
        Side("by messages", elsewhere, ranks),
        Side("by RPC", elsewhere, {**ranks, "collector": "RPCDataCollector"}),
        Side(PROCESSES, ours, {**work, "collector": "MultiSyncDataCollector"}),
        Side(PEER, torchrls, ranks, needs="torchrl", spawns=True),
    ]


def test_pendulum(compare: Callable[..., None]) -> None:
    """Compare one Pendulum per rank with sync rollouts of 200 steps."""
    compare(
        f"Pendulum, torch.distributed, {RANKS} ranks, sync, T={STEPS}",
        sides(PENDULUM),
        frame_bytes=workloads.PENDULUM_BYTES,
        wanted={PEER: 8, PROCESSES: 0.9},
    )


@pytest.mark.full
def test_pixels_of_ranks(compare: Callable[..., None]) -> None:
    """Compare frames of pixels of a free environment, with a module as policy."""
    compare(
        f"pixels, torch.distributed, {RANKS} ranks, sync",
        sides(test_pixels.work("module")),
        frame_bytes=test_pixels.FRAME_BYTES,
        wanted={PEER: 8, PROCESSES: 0.9},
    )
