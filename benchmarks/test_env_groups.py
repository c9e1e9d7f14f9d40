"""`env_groups=2`: the policy is called for one half of the environments while the other steps.

A policy on a separate device takes a quarter of a millisecond per environment. Eight environments
are stepped by a simulator that also takes a quarter of a millisecond for each, or in processes of
AsyncVectorEnv that each take 2 ms. Without groups, policy and environments take 4 ms for a step of
all. With two groups, simulator and policy overlap fully and take 2 ms. With processes, a step of a
group takes 2 ms and its policy call 1 ms. The limit is the policy alone.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from benchmarks import workloads
from benchmarks.race import Side
from pycollect.bench.sides import ours

ENVS = 8
STEPS = 50
SECONDS_EACH = 0.00025
SECONDS = 0.002
FRAME_BYTES = workloads.PENDULUM_BYTES


class Waiting(gymnasium.Env):
    """Each step waits, as for a simulator in another process."""

    observation_space = Box(-1.0, 1.0, (3,), np.float32)
    action_space = Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Start an endless episode."""
        return np.zeros(3, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Wait."""
        time.sleep(SECONDS)
        return np.zeros(3, np.float32), 1.0, False, False, {}


class Simulator(VectorEnv):
    """A simulator that steps its environments in the background, one after the other."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012 (as Gymnasium has it)

    def __init__(self, num_envs: int) -> None:
        """Create the spaces; episodes are endless."""
        self.num_envs = num_envs
        self.single_observation_space = Waiting.observation_space
        self.single_action_space = Waiting.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.ready = 0.0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Return zeros."""
        return np.zeros((self.num_envs, 3), np.float32), {}

    def send(self, actions: np.ndarray) -> None:
        """Start a step."""
        self.ready = time.perf_counter() + SECONDS_EACH * self.num_envs

    def recv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Wait for the end of the step."""
        rest = self.ready - time.perf_counter()
        if rest > 0:
            time.sleep(rest)
        none = np.zeros(self.num_envs, bool)
        return np.zeros((self.num_envs, 3), np.float32), np.ones(self.num_envs), none, none, {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Start a step and wait for its end."""
        self.send(actions)
        return self.recv()


def processes(num_envs: int) -> AsyncVectorEnv:
    """Return environments with a process each."""
    return AsyncVectorEnv([Waiting] * num_envs)


def make_policy() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the policy."""
    return policy


def policy(observation: torch.Tensor) -> torch.Tensor:
    """Take a time in proportion to the number of environments."""
    time.sleep(SECONDS_EACH * len(observation))
    return torch.zeros(len(observation), 1)


def work(make: Callable[[int], Any], groups: int) -> dict[str, Any]:
    """Return the arguments of a collector with that many groups."""
    return {
        "collector": "SyncDataCollector",
        "env": partial(make, ENVS // groups),
        "policy": make_policy,
        "frames_per_batch": ENVS * STEPS,
        "env_groups": groups,
    }


def policy_alone() -> Iterator[int]:
    """Call the policy for each half in turn, without environments."""
    half = torch.zeros(ENVS // 2, 3)
    while True:
        for _ in range(2 * STEPS):
            policy(half)
        yield ENVS * STEPS


def test_a_simulator(compare: Callable[..., None]) -> None:
    """Compare a policy and environments that take equally long."""
    compare(
        "8 environments of a simulator, 2 ms, policy of 2 ms",
        [
            Side("env_groups=2", ours, work(Simulator, 2)),
            Side("env_groups=1", ours, work(Simulator, 1)),
            Side("policy alone", policy_alone),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={"env_groups=1": 1.7, "policy alone": 0.9},
    )


@pytest.mark.full
def test_processes(compare: Callable[..., None]) -> None:
    """Compare environments whose step takes the same time for any number of them."""
    compare(
        "8 processes of AsyncVectorEnv, 2 ms each, policy of 2 ms",
        [
            Side("env_groups=2", ours, work(processes, 2)),
            Side("env_groups=1", ours, work(processes, 1)),
            Side("policy alone", policy_alone),
        ],
        frame_bytes=FRAME_BYTES,
        wanted={"env_groups=1": 1.2},
    )
