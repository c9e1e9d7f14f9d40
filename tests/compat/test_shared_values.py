"""Environments that share values, locks and statistics across processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from raising import refused

import pycollect

pytest.importorskip("torchrl")

import torchrl.testing.mocking_classes as mock
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import (
    Compose,
    DTypeCastTransform,
    EnvCreator,
    TrajCounter,
    TransformedEnv,
    VecNorm,
)

ARGUMENTS: dict[str, Any] = {"frames_per_batch": 20, "total_frames": 60, "cat_results": "stack"}
OURS = pytest.param(pycollect.MultiSyncCollector, id="ours")
BOTH = [OURS, pytest.param(MultiSyncCollector, id="theirs", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _spawning() -> Iterator[None]:
    """Use "spawn", as after TorchRL's import: shared values are bound to a start method."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def counting() -> Any:
    return mock.CountingEnv(max_steps=4)


def counted() -> Any:
    return TransformedEnv(counting(), TrajCounter())


def normalised() -> Any:
    cast = DTypeCastTransform(torch.int32, torch.float32, in_keys=["observation"])
    return TransformedEnv(counting(), Compose(cast, VecNorm(in_keys=["observation"], decay=1.0)))


@pytest.mark.processes
@pytest.mark.parametrize("collector_class", BOTH)
def test_trajectories_of_all_processes_are_counted_together(collector_class: Any) -> None:
    collector = collector_class([EnvCreator(counted)] * 2, None, **ARGUMENTS)
    rows = torch.cat([td["traj_count"].clone().view(2, -1) for td in collector], 1)
    collector.shutdown()
    counts = [set(row.tolist()) for row in rows]
    assert counts[0] & counts[1] <= {0, 1}  # both begin before either is counted
    assert min(map(len, counts)) > 1


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("collector_class", BOTH)
def test_statistics_of_all_processes_are_one(collector_class: Any) -> None:
    creator = EnvCreator(normalised)
    before = _count(creator)
    collector = collector_class([creator] * 2, None, **ARGUMENTS)
    frames = sum(td.numel() for td in collector)
    collector.shutdown()
    assert _count(creator) - before >= frames  # resets are counted, too


def _count(creator: Any) -> float:
    (entries,) = creator.state_dict().values()
    return float(entries["observation_count"])


class Tallying(mock.CountingEnv):
    """Count steps in a shared value."""

    def __init__(self, tally: Any) -> None:
        super().__init__(max_steps=4)
        self.tally = tally

    def _step(self, tensordict: Any) -> Any:
        with self.tally.get_lock():
            self.tally.value += 1
        return super()._step(tensordict)


@pytest.mark.processes
def test_a_shared_value_in_a_callable() -> None:
    tally = multiprocessing.get_context("spawn").Value("i", 0)
    collector = pycollect.MultiSyncCollector(
        [partial(Tallying, tally), lambda: Tallying(tally)], None, prefetch=0, **ARGUMENTS
    )
    frames = sum(td.numel() for td in collector)
    collector.shutdown()
    assert tally.value == frames == 60


def test_actors_cannot_share_them() -> None:
    with refused(TypeError, "create_env_fn") as caught:
        pycollect.RayCollector([EnvCreator(counted)], None, frames_per_batch=20, total_frames=20)
    assert "MultiSyncDataCollector" in str(caught.value)
