"""Two processes of this machine that collect for one learner.

The limit is that many plain loops at once, each in a process of its own, which nobody has to wait
for. Gymnasium's AsyncVectorEnv and Stable-Baselines3's SubprocVecEnv have one process per
environment, and the policy in this one. Pixels come from an environment that is free, so that
transport is measured: the limit is one thread that copies a batch of that size from memory to
memory. Ray's actors on the driver's node go the same way as processes, and should cost no more.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from benchmarks import test_pendulum, test_pixels, workloads
from benchmarks.race import Side
from pycollect.bench.workloads import FreeFrames

PEER = "TorchRL"
WORKERS = 2
STEPS = 400
LOOPS = f"{WORKERS} plain loops"
VECTOR = "AsyncVectorEnv"
SUBPROC = "SubprocVecEnv"


def cartpole() -> gymnasium.Env:
    """CartPole-v1 as ``gymnasium.make`` gives it."""
    return gymnasium.make("CartPole-v1")


def cartpole_policy() -> torch.nn.Module:
    """A push to the side to which the pole leans: CartPole takes an index."""
    return Leaning()


class Leaning(torch.nn.Module):
    """Index 1 where the third number is positive, else 0."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return one index per environment."""
        return (observation[..., 2] > 0).long()


ENVS: dict[str, tuple[Callable[[], gymnasium.Env], Callable[[], Any], int]] = {
    "Pendulum": (workloads.pendulum, workloads.linear, 3),
    "CartPole": (cartpole, cartpole_policy, 4),
}
"""By name: the environment, its bare policy, and the numbers in one observation."""


def in_tensordict(name: str) -> Any:
    """The policy as users of collectors write it."""
    from tensordict.nn import TensorDictModule

    return TensorDictModule(ENVS[name][1](), in_keys=["observation"], out_keys=["action"])


def ours(name: str, envs: int, sync: bool = True) -> Iterator[int]:
    """MultiSyncDataCollector, or MultiaSyncDataCollector, of pycollect."""
    from pycollect import MultiaSyncDataCollector, MultiSyncDataCollector

    make = ENVS[name][0]
    frames = STEPS * envs
    with (MultiSyncDataCollector if sync else MultiaSyncDataCollector)(
        [[make] * envs if envs > 1 else make] * WORKERS,
        in_tensordict(name),
        frames_per_batch=frames * WORKERS if sync else frames,
        total_frames=workloads.FOREVER,
    ) as collector:
        for batch in collector:
            yield workloads.read(batch)


def torchrl(name: str, envs: int, sync: bool = True) -> Iterator[int]:
    """The same of TorchRL; several environments as its SerialEnv."""
    from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

    frames = STEPS * envs
    collector = (MultiSyncCollector if sync else MultiAsyncCollector)(
        [partial(_torchrls_env, name, envs)] * WORKERS,
        in_tensordict(name),
        frames_per_batch=frames * WORKERS if sync else frames,
        total_frames=workloads.FOREVER,
        **({"cat_results": "stack"} if sync else {}),
    )
    try:
        for batch in collector:
            yield workloads.read(batch)
    finally:
        collector.shutdown()


def _torchrls_env(name: str, envs: int) -> Any:
    from torchrl.envs import SerialEnv

    make = workloads.for_torchrl(ENVS[name][0])
    return make() if envs == 1 else SerialEnv(envs, make)


def plain_loop(name: str, envs: int) -> Iterator[int]:
    """What one writes by hand: environments one after the other, one call of the bare module."""
    make, module, size = ENVS[name]
    batch = [make() for _ in range(envs)]
    policy = module()
    discrete = name == "CartPole"
    current = np.stack([env.reset()[0] for env in batch])
    observations = np.empty((STEPS, envs, size), np.float32)
    actions = np.empty((STEPS, envs) if discrete else (STEPS, envs, 1), np.float32)
    rewards = np.empty((STEPS, envs), np.float32)
    flags = np.empty((2, STEPS, envs), bool)
    arrays = [torch.from_numpy(array) for array in (observations, actions, rewards)]
    while True:
        with torch.no_grad():
            for t in range(STEPS):
                action = policy(torch.from_numpy(current)).numpy()
                observations[t], actions[t] = current, action
                for p, env in enumerate(batch):
                    own = int(action[p]) if discrete else action[p]
                    current[p], rewards[t, p], ended, cut, _ = env.step(own)
                    flags[:, t, p] = ended, cut
                    if ended or cut:
                        current[p], _ = env.reset()
        workloads.read_tensors(*arrays)
        yield STEPS * envs


def vector(name: str, envs: int) -> Iterator[int]:
    """Gymnasium's AsyncVectorEnv over all environments, and the bare module."""
    env = gymnasium.vector.AsyncVectorEnv([ENVS[name][0]] * WORKERS * envs)
    return _stepped_together(name, env, env.reset()[0])


def subproc(name: str, envs: int) -> Iterator[int]:
    """The same by Stable-Baselines3's SubprocVecEnv, as it starts its processes by default."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([ENVS[name][0]] * WORKERS * envs)
    return _stepped_together(name, env, env.reset())


def _stepped_together(name: str, env: Any, current: Any) -> Iterator[int]:
    """Batches of an env that steps all its environments at once."""
    _, module, size = ENVS[name]
    policy = module()
    observations = np.empty((STEPS, len(current), size), np.float32)
    rewards = np.empty((STEPS, len(current)), np.float32)
    arrays = [torch.from_numpy(array) for array in (observations, rewards)]
    try:
        while True:
            with torch.no_grad():
                for t in range(STEPS):
                    action = policy(torch.from_numpy(current)).numpy()
                    observations[t] = current
                    current, rewards[t], *_ = env.step(action)
            workloads.read_tensors(*arrays)
            yield STEPS * len(current)
    finally:
        env.close()


@pytest.mark.parametrize("envs", [1, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["Pendulum", pytest.param("CartPole", marks=pytest.mark.full)])
def test_sync(compare: Callable[..., None], name: str, envs: int) -> None:
    """Batches that are complete when both workers have delivered."""
    work = {"name": name, "envs": envs}
    compare(
        f"{name}, processes, sync, {WORKERS} workers of {envs}, T={STEPS}",
        [
            Side("pycollect", ours, work),
            Side(PEER, torchrl, work, needs="torchrl"),
            Side(LOOPS, plain_loop, work, processes=WORKERS),
            Side(VECTOR, vector, work, spawns=True),
            Side(SUBPROC, subproc, work, needs="stable_baselines3", spawns=True),
        ],
        frame_bytes=2 * ENVS[name][2] * 4,
        wanted={PEER: 8, LOOPS: 0.95} if envs == 1 else {LOOPS: 0.95},
    )


@pytest.mark.parametrize(
    ("name", "envs"),
    [
        ("Pendulum", 1),
        pytest.param("CartPole", 1, marks=pytest.mark.full),
        pytest.param("CartPole", 8, marks=pytest.mark.full),
    ],
)
def test_async(compare: Callable[..., None], name: str, envs: int) -> None:
    """First ready, first served."""
    work = {"name": name, "envs": envs}
    compare(
        f"{name}, processes, async, {WORKERS} workers of {envs}, T={STEPS}",
        [
            Side("pycollect", ours, {**work, "sync": False}, group=WORKERS, ahead=2),
            Side(
                PEER, torchrl, {**work, "sync": False}, group=WORKERS, needs="torchrl", spawns=True
            ),
            Side(LOOPS, plain_loop, work, processes=WORKERS),
        ],
        frame_bytes=2 * ENVS[name][2] * 4,
        wanted={PEER: 8, LOOPS: 0.95} if envs == 1 else {LOOPS: 0.95},
    )


def pixels(collector: str, policy: Any) -> Iterator[int]:
    """Sync batches of free pixels from two processes, of pycollect or of TorchRL."""
    make: Any = FreeFrames
    if collector == "TorchRL":
        from torchrl.collectors import MultiSyncCollector as Collector

        make = workloads.for_torchrl(make)
    else:
        from pycollect import MultiSyncDataCollector as Collector
    running = Collector(
        [make] * WORKERS,
        policy,
        frames_per_batch=test_pixels.FRAMES,
        total_frames=workloads.FOREVER,
    )
    try:
        for batch in running:
            yield workloads.read_pixels(batch)
    finally:
        running.shutdown()


@test_pixels.POLICIES
def test_multi_pixels(compare: Callable[..., None], policy: str) -> None:
    """The collector's random actions, or a module that is given each frame."""
    given = test_pixels.policy_of(policy)
    compare(
        f"pixels, processes, {WORKERS} workers, {policy} policy",
        [
            Side("pycollect", pixels, {"collector": "pycollect", "policy": given}),
            Side(
                PEER,
                pixels,
                {"collector": "TorchRL", "policy": given},
                needs="torchrl",
                spawns=True,
            ),
            Side(test_pixels.LIMIT, test_pixels.memcpy),
        ],
        frame_bytes=test_pixels.FRAME_BYTES,
        wanted=test_pixels.wanted(policy),
    )


@pytest.mark.parametrize("sync", [True, pytest.param(False, marks=pytest.mark.full)])
def test_ray_beside_processes(compare: Callable[..., None], ray_address: str, sync: bool) -> None:
    """The same work in actors on this node and in processes."""
    processes = "pycollect, processes"
    group, ahead = (1, 0) if sync else (WORKERS, 2)
    kind = "sync" if sync else "async"
    compare(
        f"Pendulum, Ray beside processes, {kind}, {WORKERS} workers, T={STEPS}",
        [
            Side(
                "pycollect, Ray",
                test_pendulum.ours_on_ray,
                {"steps": STEPS, "actors": WORKERS, "sync": sync},
                ray_address=ray_address,
                group=group,
                ahead=ahead,
            ),
            Side(
                processes,
                ours,
                {"name": "Pendulum", "envs": 1, "sync": sync},
                group=group,
                ahead=ahead,
            ),
        ],
        frame_bytes=test_pendulum.FRAME_BYTES,
        wanted={processes: 0.9},
    )
