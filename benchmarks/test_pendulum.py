"""One Pendulum per worker and a linear policy: what a step costs besides environment and policy."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

from benchmarks import workloads
from benchmarks.race import Side

PEER = "TorchRL"
FRAME_BYTES = 2 * 3 * 4
"""Observation before and after the step."""


def ours(
    frames: int, policy: Callable[[], TensorDictModule] = workloads.linear_policy
) -> Iterator[int]:
    """SyncDataCollector of pycollect."""
    from pycollect import SyncDataCollector

    with SyncDataCollector(
        workloads.pendulum,
        policy(),
        frames_per_batch=frames,
        total_frames=workloads.FOREVER,
    ) as collector:
        for batch in collector:
            yield workloads.read(batch)


def torchrl(frames: int) -> Iterator[int]:
    """Collector of TorchRL (its SyncDataCollector until 0.12)."""
    from torchrl.collectors import Collector

    collector = Collector(
        workloads.for_torchrl(workloads.pendulum),
        workloads.linear_policy(),
        frames_per_batch=frames,
        total_frames=workloads.FOREVER,
    )
    try:
        for batch in collector:
            yield workloads.read(batch)
    finally:
        collector.shutdown()


def plain_loop(
    frames: int, module: Callable[[], torch.nn.Module] = workloads.linear
) -> Iterator[int]:
    """What one writes by hand: the bare module, and preallocated arrays."""
    env = workloads.pendulum()
    policy = module()
    observations = np.empty((frames, 3), np.float32)
    actions = np.empty((frames, 1), np.float32)
    rewards = np.empty((frames, 1), np.float32)
    terminated = np.empty((frames, 1), bool)
    truncated = np.empty((frames, 1), bool)
    arrays = [torch.from_numpy(array) for array in (observations, actions, rewards)]
    observation, _ = env.reset()
    while True:
        with torch.no_grad():
            for t in range(frames):
                action = policy(torch.from_numpy(observation)).numpy()
                observations[t] = observation
                actions[t] = action
                observation, reward, ended, cut, _ = env.step(action)
                rewards[t] = reward
                terminated[t] = ended
                truncated[t] = cut
                if ended or cut:
                    observation, _ = env.reset()
        workloads.read_tensors(*arrays)
        yield frames


def ours_on_ray(steps: int, actors: int, sync: bool, census: str) -> Iterator[int]:
    """RayCollector of pycollect."""
    from pycollect import RayCollector

    with RayCollector(
        [workloads.in_actor(workloads.pendulum, census)] * actors,
        workloads.linear_policy(),
        frames_per_batch=steps * actors if sync else steps,
        total_frames=workloads.FOREVER,
        sync=sync,
        remote_configs=workloads.ACTOR,
    ) as collector:
        for batch in collector:
            yield workloads.read(batch)


def torchrl_on_ray(steps: int, actors: int, sync: bool, census: str) -> Iterator[int]:
    """RayCollector of TorchRL."""
    from torchrl.collectors.distributed import RayCollector

    make = workloads.for_torchrl(workloads.in_actor(workloads.pendulum, census))
    collector = RayCollector(
        [make] * actors,
        workloads.linear_policy(),
        frames_per_batch=steps * actors if sync else steps,
        total_frames=workloads.FOREVER,
        sync=sync,
        remote_configs=workloads.ACTOR,
    )
    try:
        for batch in collector:
            yield workloads.read(batch)
    finally:
        collector.shutdown()


@pytest.mark.parametrize("frames", [200, pytest.param(2000, marks=pytest.mark.full)])
def test_in_process(compare: Callable[..., None], frames: int) -> None:
    """One environment in this process."""
    work = {"frames": frames}
    compare(
        f"Pendulum, in process, T={frames}",
        [
            Side("pycollect", ours, work),
            Side(PEER, torchrl, work, needs="torchrl"),
            Side("plain loop", plain_loop, work),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={PEER: 10, "plain loop": 0.9},
    )


@pytest.mark.full
def test_opaque_policy(compare: Callable[..., None]) -> None:
    """A module that pycollect does not know, and calls as the plain loop calls its own."""
    compare(
        "Pendulum, in process, T=2000, unknown module",
        [
            Side("pycollect", ours, {"frames": 2000, "policy": workloads.opaque_policy}),
            Side("plain loop", plain_loop, {"frames": 2000}),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={"plain loop": 1.0},
    )


@pytest.mark.full
def test_slow_policy(compare: Callable[..., None]) -> None:
    """A policy of 1 ms: what a collector adds should not show."""
    compare(
        "Pendulum, in process, T=200, a policy of 1 ms",
        [
            Side("pycollect", ours, {"frames": 200, "policy": workloads.slow_policy}),
            Side("plain loop", plain_loop, {"frames": 200, "module": workloads.slow}),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={"plain loop": 0.95},
    )


@pytest.mark.parametrize("steps", [200, pytest.param(2000, marks=pytest.mark.full)])
@pytest.mark.parametrize("actors", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("sync", [True, pytest.param(False, marks=pytest.mark.full)])
def test_on_ray(
    compare: Callable[..., None], ray_address: str, steps: int, actors: int, sync: bool
) -> None:
    """Rollouts of `steps` from each actor; the limit is that many plain loops at once."""
    work = {"steps": steps, "actors": actors, "sync": sync}
    group = 1 if sync else actors
    workers = "1 actor" if actors == 1 else f"{actors} actors"
    limit = "plain loop" if actors == 1 else f"{actors} plain loops"
    compare(
        f"Pendulum, Ray, {workers}, {'sync' if sync else 'async'}, T={steps}",
        [
            Side(
                "pycollect",
                ours_on_ray,
                work,
                ray_address=ray_address,
                group=group,
                ahead=0 if sync else 2,
            ),
            Side(
                PEER,
                torchrl_on_ray,
                work,
                ray_address=ray_address,
                group=group,
                ahead=0 if sync else 1,
                needs="torchrl",
                spawns=True,
            ),
            Side(limit, plain_loop, {"frames": steps}, processes=actors),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={PEER: 10, limit: 0.95 if actors > 1 else 0.9},
    )
