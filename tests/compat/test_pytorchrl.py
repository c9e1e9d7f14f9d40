"""PyTorchRL's programs give the same data with our CWorkerSet, for the same seeds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pytorchrl")
pytest.importorskip("gym")
pytest.importorskip("lz4")
pytest.importorskip("ray")
pytest.importorskip("scipy")
import pytorchrl as prl
from pytorchrl.scheme import CWorkerSet as TheirSet
from pytorchrl.scheme.collection.c_worker import CWorker as TheirWorker
from pytorchrl.scheme.gradients import g_worker
from pytorchrl_support import PROGRAMS, Factories, learn, ppo, ppo_with_gae_in_processes

from pycollect import scheme
from pycollect.scheme import CWorker, CWorkerSet, unpack

ROLLOUTS = 3


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}/{key}")
    elif isinstance(theirs, (torch.Tensor, np.ndarray)):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs), err_msg=where)
    else:
        assert ours == theirs, where


def without_time(info: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if key != "Time"}


def rollouts(worker: Any, count: int = ROLLOUTS) -> list[Any]:
    """Return copies of a worker's rollouts, because storages reuse their memory."""
    return [copy.deepcopy(worker.collect_data()) for _ in range(count)]


def theirs_of(factories: Factories, index: int, weights: Any = None) -> list[Any]:
    worker = TheirWorker(index, 0, initial_weights=weights, device="cpu", **factories.named)
    try:
        return rollouts(worker)
    finally:
        worker.stop()


def assert_same_rollouts(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for (data, info), (their_data, their_info) in zip(ours, theirs, strict=True):
        assert_same(data, their_data, "data")
        assert_same(without_time(info), without_time(their_info), "info")
        assert set(info["Time"]) == set(their_info["Time"])


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_local_worker(program: Callable[[], Factories]) -> None:
    factories = program()
    worker = CWorker(0, 0, device="cpu", **factories.named)
    ours = rollouts(worker)
    worker.stop()
    assert_same_rollouts(ours, theirs_of(factories, 0))


@pytest.mark.slow
@pytest.mark.processes
def test_environments_in_processes() -> None:
    factories = ppo_with_gae_in_processes()
    worker = CWorker(0, 0, device="cpu", **factories.named)
    ours = rollouts(worker)
    worker.stop()
    assert_same_rollouts(ours, theirs_of(factories, 0))


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_whole_program(program: Callable[[], Factories]) -> None:
    """Collection, gradients and updates: only the import of CWorkerSet differs."""
    factories = program()
    infos, weights = learn(CWorkerSet, factories, 10)
    their_infos, their_weights = learn(TheirSet, factories, 10)
    assert_same(weights, their_weights)
    for info, their_info in zip(infos, their_infos, strict=True):
        assert_same(without_time(info), without_time(their_info))


@pytest.mark.ray
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_remote_workers(program: Callable[[], Factories], packed: bool, ray_cluster: Any) -> None:
    """Each remote worker equals a local PyTorchRL worker with the same index and weights."""
    factories = program()
    workers = CWorkerSet(
        2,
        0,
        local_device="cpu",
        compress_data_to_send=packed,
        worker_remote_config={"memory": 1024**3},
        **factories.named,
    )
    try:
        weights = {"ActorVersion": 0, "ActorWeights": workers.local_worker().get_weights()}
        ours = [
            [unpack(ray_cluster.get(worker.collect_data.remote())) for _ in range(ROLLOUTS)]
            for worker in workers.remote_workers()
        ]
    finally:
        workers.stop()
    for index, collected in enumerate(ours, 1):
        assert_same_rollouts(collected, theirs_of(factories, index, weights))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("communication", [prl.SYNC, prl.ASYNC])
def test_their_learner_over_remote_workers(
    communication: str, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It calls two functions that need removed features of Ray, so the test replaces them."""
    monkeypatch.setattr(g_worker, "ray_get_and_free", ray_cluster.get)
    monkeypatch.setattr(g_worker, "broadcast_message", scheme.broadcast_message)
    resources = {"num_cpus": 1, "memory": 1024**3}
    infos, _ = learn(CWorkerSet, ppo(), 12, 2, communication, col_worker_resources=resources)
    versions = [info["ActorVersion"] for info in infos]
    assert [own["ActorUpdate"] for own in versions] == list(range(12))
    assert all(own["GradientCompute"] >= own["DataCollection"] for own in versions)
    assert sum(info["NumberSamples"] for info in infos) == 3 * 48  # four updates with each


def test_packed_data_reach_their_learner() -> None:
    """The learner unpacks our compressed results as a tuple, which restores them."""

    class PackedSet(CWorkerSet):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**{**arguments, "compress_data_to_send": True})

    _, weights = learn(PackedSet, ppo(), 6)
    _, their_weights = learn(TheirSet, ppo(), 6)
    assert_same(weights, their_weights)
