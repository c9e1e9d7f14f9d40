"""Shape of an environment's reward: one number, or one per objective of `reward_space`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorRewardWrapper, VectorWrapper

from pycollect._core import Leaf

SEVERAL_REWARDS = (
    "; for a vector of rewards, give the environment a reward_space, a Box of shape [k]"
)


def declared_reward(env: Any, draw: Callable[[], Any], num_envs: int | None = None) -> Leaf | None:
    """Return the leaf of one environment's reward, or ``None`` if the environment declares none.

    A `reward_space` that is a Box of shape ``[k]`` declares a vector, as in MO-Gymnasium. A vector
    environment may also have `single_reward_space`, or a `reward_space` of shape ``[P, k]``. Other
    values are ignored. If a wrapper may reduce the vector to one number, one step decides.

    Args:
        env: Environment or vector environment, with its wrappers.
        draw: Makes a step and returns its reward; called only if a wrapper may change the shape.
        num_envs: P of a vector environment. Defaults to ``None``: a single environment.
    """
    may_change = False
    for layer in _layers(env):
        if (shape := _declared(layer, num_envs)) is not None:
            is_number = may_change and np.ndim(draw()) == (num_envs is not None)
            return None if is_number else Leaf(("reward",), "float32", shape)
        may_change = may_change or _may_change_rewards(layer)
    return None


def _layers(env: Any) -> Iterator[Any]:
    """Yield the wrappers, the outermost first, and the environment inside."""
    while isinstance(env, gymnasium.Wrapper | VectorWrapper):
        yield env
        env = env.env
    yield env


def _declared(layer: Any, num_envs: int | None) -> tuple[int, ...] | None:
    """Return the shape that this layer itself declares for one environment's reward."""
    names = ("reward_space",) if num_envs is None else ("single_reward_space", "reward_space")
    for name in names:
        # Not via `__dict__`: reading it slows the environment down, see `gymnasium_support`.
        space = getattr(layer, name, None)
        shape = space.shape if isinstance(space, spaces.Box) else ()
        if len(shape) == 2 and name == "reward_space" and shape[0] == num_envs:
            shape = shape[1:]
        if len(shape) == 1 and shape[0] > 0:
            return shape
    return None


def _may_change_rewards(layer: Any) -> bool:
    """Return whether a wrapper may change rewards: a reward wrapper, or one of another package."""
    if isinstance(layer, gymnasium.RewardWrapper | VectorRewardWrapper):
        return True
    module: str = type(layer).step.__module__
    return module.partition(".")[0] != "gymnasium"
