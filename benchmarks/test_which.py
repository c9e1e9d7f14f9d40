"""Four environments and two cores: more collectors, or more environments in one?

TorchRL's page on distributed collectors asks this question. Processes that collect communicate once
per rollout, and each calls the policy. One policy call for all environments needs communication at
each step.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AsyncVectorEnv
from torch import nn

from benchmarks import workloads
from benchmarks.race import Side
from pycollect.bench.sides import for_torchrl, ours

ENVS = 4
STEPS = 100
LARGE = 1024


class Waiting(gymnasium.Env):
    """Each step waits for a millisecond, as for a simulator in another process."""

    def __init__(self) -> None:
        """Create spaces with observations of 3 floats."""
        self.observation_space = Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Start an endless episode."""
        return np.zeros(3, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Wait."""
        time.sleep(0.001)
        return np.zeros(3, np.float32), 1.0, False, False, {}


ENVIRONMENTS: dict[str, Callable[[], gymnasium.Env]] = {
    "Pendulum": workloads.pendulum,
    "1 ms waits": Waiting,
}


def large() -> nn.Module:
    """Return a network of three layers of 1,024."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, LARGE), nn.Tanh(), nn.Linear(LARGE, LARGE), nn.Tanh(), nn.Linear(LARGE, 1)
    )


NETWORKS = {"linear": workloads.linear, "3 x 1024": large}


def async_vector(make: Callable[[], gymnasium.Env]) -> AsyncVectorEnv:
    """Return Gymnasium's environments in processes."""
    return AsyncVectorEnv([make] * ENVS)


def parallel(make: Callable[[], gymnasium.Env]) -> Any:
    """Return TorchRL's environments in processes."""
    from torchrl.envs import ParallelEnv

    return ParallelEnv(ENVS, for_torchrl(make))


@pytest.mark.parametrize("policy", ["linear", pytest.param("3 x 1024", marks=pytest.mark.full)])
@pytest.mark.parametrize("env", ["Pendulum", pytest.param("1 ms waits", marks=pytest.mark.full)])
def test_which(compare: Callable[..., None], env: str, policy: str) -> None:
    """Compare cheap and waiting environments with a small and a large policy."""
    make = ENVIRONMENTS[env]

    def side(name: str, entry: Any, collector: str = "SyncDataCollector") -> Side:
        network = partial(workloads.as_policy, NETWORKS[policy])
        work = {"collector": collector, "env": entry, "policy": network}
        return Side(name, ours, {**work, "frames_per_batch": STEPS * ENVS})

    theirs = side("ParallelEnv", partial(parallel, make))
    compare(
        f"which: {ENVS} x {env}, policy {policy}, T={STEPS}",
        [
            side("a process each", [make] * ENVS, "MultiSyncDataCollector"),
            side("callables", [make] * ENVS),
            side("AsyncVectorEnv", partial(async_vector, make)),
            replace(theirs, needs="torchrl", spawns=True),
        ],
        frame_bytes=workloads.PENDULUM_BYTES,
        wanted={},
    )
