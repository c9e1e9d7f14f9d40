"""Four environments and two cores: more collectors, or more environments in one?

The question of TorchRL's page on distributed collectors: processes that collect communicate once
per rollout and call the policy each for itself; one policy call for all communicates at each step.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AsyncVectorEnv
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks import workloads
from benchmarks.race import Side

ENVS = 4
STEPS = 100
LARGE = 1024


class Waiting(gymnasium.Env):
    """Each step waits for a millisecond, as for a simulator elsewhere."""

    def __init__(self) -> None:
        """Frames of 3 floats."""
        self.observation_space = Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Start an episode, which has no end."""
        return np.zeros(3, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Wait."""
        time.sleep(0.001)
        return np.zeros(3, np.float32), 1.0, False, False, {}


ENVIRONMENTS: dict[str, Callable[[], gymnasium.Env]] = {
    "Pendulum": workloads.pendulum,
    "1 ms waits": Waiting,
}


def large_policy() -> TensorDictModule:
    """Three layers of 1,024."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(3, LARGE), nn.Tanh(), nn.Linear(LARGE, LARGE), nn.Tanh(), nn.Linear(LARGE, 1)
    )
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


POLICIES = {"linear": workloads.linear_policy, "3 x 1024": large_policy}


def collectors(env: str, policy: str) -> Iterator[int]:
    """A process for each environment."""
    from pycollect import MultiSyncDataCollector

    return _batches(MultiSyncDataCollector, [ENVIRONMENTS[env]] * ENVS, policy)


def callables(env: str, policy: str) -> Iterator[int]:
    """All of them in this process, one after the other, and one policy call."""
    return _in_process([ENVIRONMENTS[env]] * ENVS, policy)


def async_vector(env: str, policy: str) -> Iterator[int]:
    """Gymnasium's processes, and one policy call."""
    return _in_process(lambda: AsyncVectorEnv([ENVIRONMENTS[env]] * ENVS), policy)


def parallel(env: str, policy: str) -> Iterator[int]:
    """TorchRL's processes, and one policy call."""
    from torchrl.envs import ParallelEnv

    return _in_process(ParallelEnv(ENVS, workloads.for_torchrl(ENVIRONMENTS[env])), policy)


def _in_process(entry: Any, policy: str) -> Iterator[int]:
    from pycollect import SyncDataCollector

    return _batches(SyncDataCollector, entry, policy)


def _batches(kind: Any, entry: Any, policy: str) -> Iterator[int]:
    with kind(
        entry,
        POLICIES[policy](),
        frames_per_batch=STEPS * ENVS,
        total_frames=workloads.FOREVER,
    ) as running:
        for batch in running:
            yield workloads.read(batch)


@pytest.mark.parametrize("policy", ["linear", pytest.param("3 x 1024", marks=pytest.mark.full)])
@pytest.mark.parametrize("env", ["Pendulum", pytest.param("1 ms waits", marks=pytest.mark.full)])
def test_which(compare: Callable[..., None], env: str, policy: str) -> None:
    """Cheap and waiting environments, a small and a large policy."""
    work = {"env": env, "policy": policy}
    compare(
        f"which: {ENVS} x {env}, policy {policy}, T={STEPS}",
        [
            Side("a process each", collectors, work),
            Side("callables", callables, work),
            Side("AsyncVectorEnv", async_vector, work),
            Side("ParallelEnv", parallel, work, needs="torchrl", spawns=True),
        ],
        frame_bytes=2 * 3 * 4,
        wanted={},
    )
