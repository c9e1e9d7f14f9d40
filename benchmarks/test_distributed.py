"""Two ranks of torch.distributed on this machine: in shared memory, and by messages.

Ranks on the driver's node go the same way as processes, and should cost no more. By messages is
how ranks on other nodes go, over the loopback interface here: what a message costs, not a network.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from unittest import mock

from benchmarks import workloads
from benchmarks.race import Side

PEER = "TorchRL"
RANKS = 2
FRAME_BYTES = 2 * 3 * 4


def ours(steps: int, messages: bool = False) -> Iterator[int]:
    """DistributedDataCollector of pycollect."""
    from pycollect import DistributedDataCollector

    elsewhere = mock.patch(
        "pycollect.engines.distributed.engine.this_node", return_value="another one"
    )
    with elsewhere if messages else nullcontext():
        collector = DistributedDataCollector(
            [workloads.pendulum] * RANKS,
            workloads.linear_policy(),
            frames_per_batch=steps * RANKS,
            total_frames=workloads.FOREVER,
            sync=True,
            launcher="mp",
        )
    with collector:
        for batch in collector:
            yield workloads.read(batch)


def processes(steps: int) -> Iterator[int]:
    """MultiSyncDataCollector of pycollect."""
    from pycollect import MultiSyncDataCollector

    with MultiSyncDataCollector(
        [workloads.pendulum] * RANKS,
        workloads.linear_policy(),
        frames_per_batch=steps * RANKS,
        total_frames=workloads.FOREVER,
    ) as collector:
        for batch in collector:
            yield workloads.read(batch)


def torchrl(steps: int) -> Iterator[int]:
    """DistributedCollector of TorchRL."""
    from torchrl.collectors.distributed import DistributedCollector

    collector = DistributedCollector(
        [workloads.for_torchrl(workloads.pendulum)] * RANKS,
        workloads.linear_policy(),
        frames_per_batch=steps * RANKS,
        total_frames=workloads.FOREVER,
        sync=True,
        launcher="mp",
    )
    try:
        for batch in collector:
            yield workloads.read(batch)
    finally:
        collector.shutdown()


def test_pendulum(compare: Callable[..., None]) -> None:
    """One Pendulum per rank, rollouts of 200 steps, sync."""
    work = {"steps": 200}
    compare(
        f"Pendulum, torch.distributed, {RANKS} ranks, sync, T=200",
        [
            Side("pycollect", ours, work),
            Side("by messages", ours, {**work, "messages": True}),
            Side("MultiSync", processes, work),
            Side(PEER, torchrl, work, needs="torchrl"),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={PEER: 8, "MultiSync": 0.9},
    )
