"""One Pendulum per worker and a linear policy: a step's cost without environment and policy."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import workloads
from benchmarks.race import Side
from pycollect.bench.sides import ours, read_tensors, torchrls

PEER = "TorchRL"
FRAME_BYTES = workloads.PENDULUM_BYTES


def work(frames: int, policy: Callable[[], Any] = workloads.linear_policy) -> dict[str, Any]:
    """Return the arguments of a collector in this process."""
    single = {"collector": "SyncDataCollector", "env": workloads.pendulum}
    return {**single, "policy": policy, "frames_per_batch": frames}


def plain_loop(
    frames: int, module: Callable[[], torch.nn.Module] = workloads.linear
) -> Iterator[int]:
    """Run a loop by hand with the bare module and preallocated arrays."""
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
        read_tensors(*arrays)
        yield frames


@pytest.mark.parametrize("frames", [200, pytest.param(2000, marks=pytest.mark.full)])
def test_in_process(compare: Callable[..., None], frames: int) -> None:
    """Compare one environment in this process."""
    compare(
        f"Pendulum, in process, T={frames}",
        [
            Side("pycollect", ours, work(frames)),
            Side(PEER, torchrls, work(frames), needs="torchrl"),
            Side("plain loop", plain_loop, {"frames": frames}),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={PEER: 10, "plain loop": 0.9},
    )


@pytest.mark.full
def test_opaque_policy(compare: Callable[..., None]) -> None:
    """Compare a module of an unknown class, which pycollect calls as the plain loop does."""
    compare(
        "Pendulum, in process, T=2000, unknown module",
        [
            Side("pycollect", ours, work(2000, partial(workloads.as_policy, workloads.opaque))),
            Side("plain loop", plain_loop, {"frames": 2000}),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={"plain loop": 1.0},
    )


@pytest.mark.full
def test_slow_policy(compare: Callable[..., None]) -> None:
    """Compare a policy that takes 1 ms, to which a collector should add hardly anything."""
    compare(
        "Pendulum, in process, T=200, a policy of 1 ms",
        [
            Side("pycollect", ours, work(200, partial(workloads.as_policy, workloads.slow))),
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
    """Compare rollouts of `steps` from Ray actors; the limit is a plain loop per actor."""
    work = {
        "env": [workloads.pendulum] * actors,
        "policy": workloads.linear_policy,
        "frames_per_batch": steps * actors if sync else steps,
        "sync": sync,
    }
    turns = {"ray_address": ray_address, "group": 1 if sync else actors}
    workers = "1 actor" if actors == 1 else f"{actors} actors"
    limit = "plain loop" if actors == 1 else f"{actors} plain loops"
    mine, theirs = ({"collect": collect, **work} for collect in (ours, torchrls))
    peer = {"ahead": 0 if sync else 1, "needs": "torchrl", "spawns": True}
    compare(
        f"Pendulum, Ray, {workers}, {'sync' if sync else 'async'}, T={steps}",
        [
            Side("pycollect", workloads.on_ray, mine, **turns, ahead=0 if sync else 2),
            Side(PEER, workloads.on_ray, theirs, **turns, **peer),
            Side(limit, plain_loop, {"frames": steps}, processes=actors),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={PEER: 10, limit: 0.95 if actors > 1 else 0.9},
    )
