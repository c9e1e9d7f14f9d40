"""Two ranks of torch.distributed on this machine: in shared memory, by messages and by RPC.

Ranks on the driver's node go the same way as processes, and should cost no more. By messages and by
RPC is how ranks on other nodes go, over the loopback interface here: what these cost, not a
network.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

from benchmarks import test_pixels, workloads
from benchmarks.race import Side
from pycollect.bench.workloads import FreeFrames

PEER = "TorchRL"
PROCESSES = "MultiSync"
RANKS = 2
STEPS = 200
FRAME_BYTES = 2 * 3 * 4
PENDULUM: dict[str, Any] = {"pixels": False}
PIXELS: dict[str, Any] = {"pixels": True}


def made(collector: Any, pixels: bool, theirs: bool = False, **arguments: Any) -> Any:
    """A collector of two Pendulums, or of free frames of pixels."""
    make: Any = FreeFrames if pixels else workloads.pendulum
    return collector(
        [workloads.for_torchrl(make) if theirs else make] * RANKS,
        test_pixels.policy_of("module") if pixels else workloads.linear_policy(),
        frames_per_batch=test_pixels.FRAMES if pixels else STEPS * RANKS,
        total_frames=workloads.FOREVER,
        **arguments,
    )


def batches(collector: Any, pixels: bool) -> Iterator[int]:
    """The frames of each batch, once it was read."""
    read = workloads.read_pixels if pixels else workloads.read
    try:
        for batch in collector:
            yield read(batch)
    finally:
        collector.shutdown()


def ours(pixels: bool, name: str = "DistributedDataCollector", away: bool = False) -> Iterator[int]:
    """DistributedDataCollector or RPCDataCollector of pycollect."""
    import pycollect

    elsewhere = mock.patch(
        "pycollect.engines.distributed.engine.this_node", return_value="another one"
    )
    with elsewhere if away else nullcontext():
        collector = made(getattr(pycollect, name), pixels, sync=True, launcher="mp")
    return batches(collector, pixels)


def processes(pixels: bool) -> Iterator[int]:
    """MultiSyncDataCollector of pycollect."""
    from pycollect import MultiSyncDataCollector

    return batches(made(MultiSyncDataCollector, pixels), pixels)


def torchrl(pixels: bool) -> Iterator[int]:
    """DistributedCollector of TorchRL."""
    from torchrl.collectors.distributed import DistributedCollector

    collector = made(DistributedCollector, pixels, theirs=True, sync=True, launcher="mp")
    return batches(collector, pixels)


def sides(work: dict[str, Any]) -> list[Side]:
    """All of them."""
    return [
        Side("pycollect", ours, work),
        Side("by messages", ours, {**work, "away": True}),
        Side("by RPC", ours, {**work, "away": True, "name": "RPCDataCollector"}),
        Side(PROCESSES, processes, work),
        Side(PEER, torchrl, work, needs="torchrl", spawns=True),
    ]


def test_pendulum(compare: Callable[..., None]) -> None:
    """One Pendulum per rank, rollouts of 200 steps, sync."""
    compare(
        f"Pendulum, torch.distributed, {RANKS} ranks, sync, T={STEPS}",
        sides(PENDULUM),
        frame_bytes=FRAME_BYTES,
        wanted={PEER: 8, PROCESSES: 0.9},
    )


def test_pixels_of_ranks(compare: Callable[..., None]) -> None:
    """Free frames of pixels, which a module is given."""
    compare(
        f"pixels, torch.distributed, {RANKS} ranks, sync",
        sides(PIXELS),
        frame_bytes=test_pixels.FRAME_BYTES,
        wanted={PEER: 8, PROCESSES: 0.9},
    )
