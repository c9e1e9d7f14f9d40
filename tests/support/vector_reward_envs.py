"""Counting environments with three rewards per step. No torch, for the reason in `echo_envs`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from echo_envs import LENGTHS, MODES, EchoEnv
from envs_for_tests import CompactVectorEnv, CountingVectorEnv
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

WEIGHTS = np.array([1.0, -0.5, 0.0])
SPACE = spaces.Box(-np.inf, np.inf, (3,), np.float32)


def several(reward: Any) -> Any:
    """Return three rewards: the reward, minus half of it, and zero."""
    return np.multiply.outer(reward, WEIGHTS)


class Several:
    """Mixin for environments: makes `step` return several rewards."""

    reward_space = SPACE

    def step(self, *given: Any) -> Any:
        observation, reward, *rest = super().step(*given)  # type: ignore[misc]
        return observation, several(reward), *rest


class SeveralEnv(Several, EchoEnv):
    """An EchoEnv with rewards of float64 [3]."""


class SeveralOfList(EchoEnv):
    """A SeveralEnv with a list of floats as rewards and its space as an instance attribute."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reward_space = SPACE

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, several(reward).tolist(), *rest


class SeveralOfDict(SeveralEnv):
    """A SeveralEnv with a Dict observation, which is stepped by the general code."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        inner = self.observation_space
        self.observation_space = spaces.Dict(observation=inner, zero=spaces.Box(0, 1, (1,)))

    def _dict(self, observation: Any) -> Any:
        return {"observation": observation, "zero": np.zeros(1, np.float32)}

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        return self._dict(observation), info

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return self._dict(observation), *rest


class SeveralSync(Several, SyncVectorEnv):
    """Gymnasium's SyncVectorEnv, which supports one reward; the mixin expands its result."""


class SeveralAsync(AsyncVectorEnv):
    """Gymnasium's AsyncVectorEnv with several rewards; it has `step_async` and `step_wait`."""

    reward_space = SPACE

    def step_wait(self, **kwargs: Any) -> Any:
        observation, reward, *rest = super().step_wait(**kwargs)
        return observation, several(reward), *rest


class SeveralRows(Several, CountingVectorEnv):
    """A foreign vector environment with a reward space for all rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reward_space = spaces.Box(-np.inf, np.inf, (self.num_envs, 3), np.float32)


class SeveralPool(CompactVectorEnv):
    """Like EnvPool: steps and resets selected rows; its reward space is that of one row."""

    single_reward_space = SPACE

    def step(self, actions: Any, env_id: Any = None) -> Any:
        observation, reward, *rest = super().step(actions, env_id)
        # A step of selected rows can call this method twice: rewards are then already expanded.
        return observation, several(reward) if reward.ndim == 1 else reward, *rest


def fns(worker: int, kind: Any, count: int = 3) -> list[Callable[[], Any]]:
    return [partial(kind, 10 * worker + p, LENGTHS) for p in range(count)]


def vector(worker: int, kind: Any, mode: str, **kwargs: Any) -> Any:
    if issubclass(kind, CountingVectorEnv):
        return kind([fn() for fn in fns(worker, EchoEnv)], mode=mode, **kwargs)
    return kind(fns(worker, EchoEnv), autoreset_mode=AutoresetMode[mode], **kwargs)


def _vector(kind: Any, mode: str, **kwargs: Any) -> Callable[[int], Any]:
    return lambda worker: partial(vector, worker, kind, mode, **kwargs)


ENTRIES: dict[str, Callable[[int], Any]] = {
    "one": lambda worker: fns(worker, SeveralEnv)[0],
    "one, a list of rewards": lambda worker: fns(worker, SeveralOfList)[0],
    "one, Dict": lambda worker: fns(worker, SeveralOfDict)[0],
    "list": lambda worker: fns(worker, SeveralEnv),
    "list of one": lambda worker: fns(worker, SeveralEnv, 1),
    "list, lists of rewards": lambda worker: fns(worker, SeveralOfList),
    "list, Dict": lambda worker: fns(worker, SeveralOfDict),
    **{f"sync {mode}": _vector(SeveralSync, mode) for mode in MODES},
    **{f"async {mode}": _vector(SeveralAsync, mode) for mode in MODES},
    **{f"rows {mode}": _vector(SeveralRows, mode) for mode in MODES},
    "pool": _vector(SeveralPool, "NEXT_STEP"),
    "ignores masks": _vector(SeveralRows, "NEXT_STEP", ignores_mask=True),
}
