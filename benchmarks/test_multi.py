"""Two processes of this machine that collect for one learner.

The limit is one plain loop per process, without waiting for each other. Gymnasium's AsyncVectorEnv
and Stable-Baselines3's SubprocVecEnv have one process per environment, and call the policy in the
main process. Pixels come from an environment that costs nothing, to measure the transport: the
limit is one thread that copies a batch from memory to memory. Ray's actors on the driver's node use
the same transport as processes, and should be as fast.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from benchmarks import test_pixels, workloads
from benchmarks.race import Side
from pycollect.bench.sides import for_torchrl, ours, read, read_tensors, torchrls

PEER = "TorchRL"
WORKERS = 2
STEPS = 400
LOOPS = f"{WORKERS} plain loops"
VECTOR = "AsyncVectorEnv"
SUBPROC = "SubprocVecEnv"


class Leaning(torch.nn.Module):
    """Index 1 if the third number is positive, else 0."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return one index per environment."""
        return (observation[..., 2] > 0).long()


ENVS: dict[str, tuple[Callable[[], gymnasium.Env], Callable[[], Any], int]] = {
    "Pendulum": (workloads.pendulum, workloads.linear, 3),
    "CartPole": (workloads.cartpole, Leaning, 4),
}
"""By name: the environment, its bare policy, and the length of an observation."""


def work(name: str, envs: int, sync: bool = True) -> dict[str, Any]:
    """Return the arguments of a collector with `envs` environments in each worker."""
    make, network, _ = ENVS[name]
    return {
        "collector": "MultiSyncDataCollector" if sync else "MultiaSyncDataCollector",
        "env": [make if envs == 1 else [make] * envs] * WORKERS,
        "policy": partial(workloads.as_policy, network),
        "frames_per_batch": STEPS * envs * (WORKERS if sync else 1),
    }


def torchrls_work(name: str, envs: int, sync: bool = True) -> dict[str, Any]:
    """Return the arguments for TorchRL, with several environments in its SerialEnv."""
    serial = [partial(_serial, ENVS[name][0], envs)] * WORKERS
    stacked = {"cat_results": "stack"} if sync else {}
    return {**work(name, envs, sync), **stacked, **({"env": serial} if envs > 1 else {})}


def _serial(make: Callable[[], Any], envs: int) -> Any:
    from torchrl.envs import SerialEnv

    return SerialEnv(envs, for_torchrl(make))


def plain_loop(name: str, envs: int) -> Iterator[int]:
    """Run a loop by hand: environments one after the other, one call of the bare module."""
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
        read_tensors(*arrays)
        yield STEPS * envs


def vector(name: str, envs: int) -> Iterator[int]:
    """Step all environments in Gymnasium's AsyncVectorEnv, with the bare module."""
    env = gymnasium.vector.AsyncVectorEnv([ENVS[name][0]] * WORKERS * envs)
    return _stepped_together(name, env, env.reset()[0])


def subproc(name: str, envs: int) -> Iterator[int]:
    """Step all environments in Stable-Baselines3's SubprocVecEnv, with its default start method."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([ENVS[name][0]] * WORKERS * envs)
    return _stepped_together(name, env, env.reset())


def _stepped_together(name: str, env: Any, current: Any) -> Iterator[int]:
    """Yield the frames of batches of an environment that steps all its environments at once."""
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
            read_tensors(*arrays)
            yield STEPS * len(current)
    finally:
        env.close()


@pytest.mark.parametrize("envs", [1, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["Pendulum", pytest.param("CartPole", marks=pytest.mark.full)])
def test_sync(compare: Callable[..., None], name: str, envs: int) -> None:
    """Compare sync collectors, whose batches need both workers."""
    size = {"name": name, "envs": envs}
    compare(
        f"{name}, processes, sync, {WORKERS} workers of {envs}, T={STEPS}",
        [
            Side("pycollect", ours, work(**size)),
            Side(PEER, torchrls, torchrls_work(**size), needs="torchrl"),
            Side(LOOPS, plain_loop, size, processes=WORKERS),
            Side(VECTOR, vector, size, spawns=True),
            Side(SUBPROC, subproc, size, needs="stable_baselines3", spawns=True),
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
    """Compare async collectors, which return the first finished rollout."""
    theirs = torchrls_work(name, envs, sync=False)
    compare(
        f"{name}, processes, async, {WORKERS} workers of {envs}, T={STEPS}",
        [
            Side("pycollect", ours, work(name, envs, sync=False), group=WORKERS, ahead=2),
            Side(PEER, torchrls, theirs, group=WORKERS, needs="torchrl", spawns=True),
            Side(LOOPS, plain_loop, {"name": name, "envs": envs}, processes=WORKERS),
        ],
        frame_bytes=2 * ENVS[name][2] * 4,
        wanted={PEER: 8, LOOPS: 0.95} if envs == 1 else {LOOPS: 0.95},
    )


def updated(every: int, **arguments: Any) -> Iterator[int]:
    """Collect, and update the weights each time after `every` batches."""
    from pycollect import MultiaSyncDataCollector

    env, policy = arguments.pop("env"), arguments.pop("policy")
    del arguments["collector"]
    with MultiaSyncDataCollector(env, policy(), **arguments) as collector:
        for number, batch in enumerate(collector, 1):
            yield read(batch)
            if number % every == 0:
                collector.update_policy_weights_()


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (1, 5 * STEPS),
        pytest.param(1, STEPS, marks=pytest.mark.full),
        pytest.param(WORKERS, STEPS, marks=pytest.mark.full),
    ],
)
def test_policy_lag(compare: Callable[..., None], every: int, steps: int) -> None:
    """Compare a limit of 1 with no limit, for equally fast workers and an update every few batches.

    With an update after each batch, a worker may only begin a rollout after its last one was
    delivered, as with `prefetch=0`. That costs 1 to 2 ms per rollout of any length.
    """
    given = {"every": every, **work("Pendulum", 1, sync=False), "frames_per_batch": steps}
    unlimited, waiting = "pycollect, no limit", "pycollect, no limit, prefetch=0"
    turns = {"group": WORKERS, "ahead": 2}
    compare(
        f"Pendulum, async, max_policy_lag, update every {every}, {WORKERS} workers, T={steps}",
        [
            Side("pycollect, max_policy_lag=1", updated, {**given, "max_policy_lag": 1}, **turns),
            Side(unlimited, updated, given, **turns),
            Side(waiting, updated, {**given, "prefetch": 0}, **turns),
        ],
        frame_bytes=workloads.PENDULUM_BYTES,
        wanted={waiting: 0.9} if every == 1 and steps == STEPS else {unlimited: 0.9},
    )


@test_pixels.POLICIES
def test_multi_pixels(compare: Callable[..., None], policy: str) -> None:
    """Compare random actions, and a module that reads each frame."""
    given = {"collector": "MultiSyncDataCollector", **test_pixels.work(policy)}
    compare(
        f"pixels, processes, {WORKERS} workers, {policy} policy",
        [
            Side("pycollect", ours, given),
            Side(PEER, torchrls, given, needs="torchrl", spawns=True),
            Side(test_pixels.LIMIT, test_pixels.memcpy),
        ],
        frame_bytes=test_pixels.FRAME_BYTES,
        wanted=test_pixels.wanted(policy),
    )


@pytest.mark.parametrize("sync", [True, pytest.param(False, marks=pytest.mark.full)])
def test_ray_beside_processes(compare: Callable[..., None], ray_address: str, sync: bool) -> None:
    """Compare actors on this node with processes."""
    processes = "pycollect, processes"
    turns = {"group": 1, "ahead": 0} if sync else {"group": WORKERS, "ahead": 2}
    kind = "sync" if sync else "async"
    here = work("Pendulum", 1, sync)
    actors = {**here, "collect": ours, "sync": sync}
    del actors["collector"]
    compare(
        f"Pendulum, Ray beside processes, {kind}, {WORKERS} workers, T={STEPS}",
        [
            Side("pycollect, Ray", workloads.on_ray, actors, ray_address=ray_address, **turns),
            Side(processes, ours, here, **turns),
        ],
        frame_bytes=workloads.PENDULUM_BYTES,
        wanted={processes: 0.9},
    )
