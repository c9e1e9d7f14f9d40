"""Components for the CWorkers tests: environments that count, and actors without delay."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from pycollect.scheme.gym import (
    ActorCritic,
    GymEnvs,
    OffPolicy,
    OnPolicy,
    QNetwork,
    RolloutStorage,
    TransitionStorage,
)

OBSERVATION = Box(-1000, 1000, (2,), np.float32)
ACTIONS = Discrete(2)
RESOURCES = {"num_cpus": 1, "memory": 1024**3}


class Counting(gymnasium.Env[Any, Any]):
    """Observation (episode, step), reward 1; an episode has `length` steps.

    Args:
        seconds: duration of a step.
        truncates: episodes end by truncation.
    """

    observation_space, action_space = OBSERVATION, ACTIONS

    def __init__(self, length: int = 5, seconds: float = 0.0, truncates: bool = False) -> None:
        self._length, self._seconds, self._truncates = length, seconds, truncates
        self._episode, self._step = -1, 0

    def _seen(self) -> Any:
        return np.array([self._episode, self._step], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._episode, self._step = self._episode + 1, 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        if self._seconds:
            time.sleep(self._seconds)
        self._step += 1
        over = self._step == self._length
        return self._seen(), 1.0, over and not self._truncates, over and self._truncates, {}


def make_of_each(
    lengths: tuple[int, ...], seconds: dict[int, float], truncates: bool, *place: Any
) -> GymEnvs:
    """Create environments with these episode lengths; workers in `seconds` are slow."""
    device, index_worker, *_ = place
    wait = seconds.get(index_worker, 0.0)
    makers = [partial(Counting, length, wait, truncates) for length in lengths]
    return GymEnvs(makers, device)


def on_policy(
    lengths: tuple[int, ...] = (5, 7),
    size: int = 12,
    seconds: dict[int, float] | None = None,
    truncates: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Return on-policy factories by argument name."""
    make = partial(make_of_each, lengths, seconds or {}, truncates)
    return {
        "train_envs_factory": make,
        "test_envs_factory": make,
        "actor_factory": ActorCritic.create_factory(OBSERVATION, ACTIONS, 8),
        "algo_factory": OnPolicy.create_factory(**settings),
        "storage_factory": RolloutStorage.create_factory(size),
    }


def off_policy(
    lengths: tuple[int, ...] = (5, 7), size: int = 100, truncates: bool = False, **settings: Any
) -> dict[str, Any]:
    """Return off-policy factories by argument name."""
    return {
        **on_policy(lengths, truncates=truncates),
        "actor_factory": QNetwork.create_factory(OBSERVATION, ACTIONS, 8),
        "algo_factory": OffPolicy.create_factory(**settings),
        "storage_factory": TransitionStorage.create_factory(size),
    }
