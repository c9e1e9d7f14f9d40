"""TorchRL's own environments, the same on both sides: what our collectors save on them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from benchmarks import workloads
from benchmarks.race import Side

PEER = "TorchRL"
LIMIT = 50
"""Frames of a trajectory in TorchRL's documented example."""


def pendulum() -> Any:
    """The environment of TorchRL's documented example."""
    from torchrl.envs import GymEnv

    return GymEnv("Pendulum-v1", device="cpu")


def transformed() -> Any:
    """The same with transforms: it has to be stepped through TorchRL."""
    from torchrl.envs import Compose, InitTracker, RewardSum, TransformedEnv

    return TransformedEnv(pendulum(), Compose(RewardSum(), InitTracker()))


def serial(make: Callable[[], Any]) -> Any:
    """Two of them, stepped one after the other."""
    from torchrl.envs import SerialEnv

    return SerialEnv(2, make)


ENVS = {
    "GymEnv": pendulum,
    "TransformedEnv": transformed,
    "SerialEnv of GymEnvs": partial(serial, pendulum),
    "SerialEnv": partial(serial, transformed),
}
UNWRAPPED = ("GymEnv", "SerialEnv of GymEnvs")


def _example(collector: Callable[..., Any], collector_class: Any, census: str) -> Any:
    """TorchRL's documented example, for ever."""
    return collector(
        [workloads.in_actor(pendulum, census)],
        workloads.linear_policy(),
        collector_class=collector_class,
        max_frames_per_traj=LIMIT,
        init_random_frames=-1,
        reset_at_each_iter=False,
        collector_kwargs={"device": "cpu", "storing_device": "cpu"},
        num_collectors=1,
        total_frames=workloads.FOREVER,
        frames_per_batch=200,
        remote_configs=workloads.ACTOR,
    )


def ours_on_ray(census: str) -> Iterator[int]:
    """RayCollector of pycollect."""
    from pycollect import RayCollector, SyncDataCollector

    with _example(RayCollector, SyncDataCollector, census) as collector:
        for batch in collector:
            yield workloads.read(batch)


def torchrl_on_ray(census: str) -> Iterator[int]:
    """RayCollector of TorchRL."""
    from torchrl.collectors import Collector
    from torchrl.collectors.distributed import RayCollector

    collector = _example(RayCollector, Collector, census)
    try:
        for batch in collector:
            yield workloads.read(batch)
    finally:
        collector.shutdown()


def ours(env: str, limit: int) -> Iterator[int]:
    """SyncDataCollector of pycollect."""
    from pycollect import SyncDataCollector

    return _in_process(SyncDataCollector, env, limit)


def torchrl(env: str, limit: int) -> Iterator[int]:
    """Collector of TorchRL (its SyncDataCollector until 0.12)."""
    from torchrl.collectors import Collector

    return _in_process(Collector, env, limit)


def _in_process(collector_class: Callable[..., Any], env: str, limit: int) -> Iterator[int]:
    collector = collector_class(
        ENVS[env],
        workloads.linear_policy(),
        frames_per_batch=400,
        total_frames=workloads.FOREVER,
        max_frames_per_traj=limit,
    )
    try:
        for batch in collector:
            yield workloads.read(batch)
    finally:
        collector.shutdown()


def test_documented_example(compare: Callable[..., None], ray_address: str) -> None:
    """TorchRL's documented example of its RayCollector, its own environment on both sides."""
    pytest.importorskip("torchrl")
    compare(
        "documented example, Ray, 1 actor, T=200",
        [
            Side("pycollect", ours_on_ray, {}, ray_address=ray_address, ahead=2),
            Side(PEER, torchrl_on_ray, {}, ray_address=ray_address, ahead=1),
        ],
        frame_bytes=2 * 3 * 4,
        wanted={PEER: 5},
    )


@pytest.mark.parametrize("limit", [0, pytest.param(LIMIT, marks=pytest.mark.full)])
@pytest.mark.parametrize("env", ENVS)
def test_in_process(compare: Callable[..., None], env: str, limit: int) -> None:
    """An environment of TorchRL in this process."""
    pytest.importorskip("torchrl")
    work = {"env": env, "limit": limit}
    compare(
        f"TorchRL's {env}, in process, {f'trajectories of {limit}' if limit else 'no limit'}",
        [Side("pycollect", ours, work), Side(PEER, torchrl, work)],
        frame_bytes=2 * 3 * 4,
        wanted={PEER: 5 if env in UNWRAPPED else 1.5},
    )
