"""Facts that a Gymnasium environment declares besides its spaces: id, time limit and rewards."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorRewardWrapper, VectorWrapper

from pycollect._core import Leaf
from pycollect.envs.registrations import load_main_entry

_IS_SLOW = (3, 11) <= sys.version_info < (3, 13)
_OWNERS = 3  # references to an unshared `__dict__`: object, `_quicken` and `getrefcount`


def quicken(env: Any) -> None:
    """Make attribute access faster by copying the `__dict__` of an environment and its wrappers.

    A dict that other code references is not replaced.

    Args:
        env: Outermost wrapper; its attribute `env` is the next inner one.
    """
    if _IS_SLOW:
        for layer in _chain(env):
            _quicken(layer)


def _chain(env: Any) -> Iterator[Any]:
    while env is not None:
        yield env
        env = getattr(env, "__dict__", {}).get("env")


def _quicken(env: Any) -> None:
    attributes = getattr(env, "__dict__", None)
    if type(attributes) is dict and sys.getrefcount(attributes) == _OWNERS:
        object.__setattr__(env, "__dict__", {**attributes})


def maker(name: str, target: str | EnvSpec) -> Callable[..., gymnasium.Env[Any, Any]]:
    """Return a callable that makes a registered environment, in any process.

    Args:
        name: Name of the argument, for errors.

    Raises:
        gymnasium.error.Error: No environment has that id; the message suggests similar ids.
        ImportError, TypeError, ValueError: The module in ``module:id`` cannot be imported.
    """
    try:
        spec = target if isinstance(target, EnvSpec) else _spec(target)
        return partial(gymnasium.make, replace(spec, entry_point=load_main_entry(spec.entry_point)))
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise type(error)(f"{name}: expected a Gymnasium id, got {target!r}: {error}") from None


def _spec(env_id: str) -> EnvSpec:
    """Return a spec as `gymnasium.make` does: import ``module:``, default to the newest version."""
    module, colon, local_id = env_id.rpartition(":")
    if colon:
        importlib.import_module(module)
    if local_id in gymnasium.registry:
        return gymnasium.spec(local_id)
    namespace, name, version = registration.parse_env_id(local_id)
    newest = registration.find_highest_version(namespace, name)
    if version is not None or newest is None:
        return gymnasium.spec(local_id)
    found = registration.get_env_id(namespace, name, newest)
    gymnasium.logger.warn(
        f"Using the latest versioned environment `{found}` instead of `{local_id}`."
    )
    return gymnasium.spec(found)


def has_time_limit(env: Any) -> bool:
    """Return whether every episode is known to end after a limited number of steps.

    Evidence is Gymnasium's `spec.max_episode_steps`, of each environment in a vector environment,
    or EnvPool's `config`.
    """
    if _of_spec(env) or _of_config(env):
        return True
    inner = getattr(env, "envs", None)
    if isinstance(inner, list | tuple) and inner:
        return all(map(has_time_limit, inner))
    with contextlib.suppress(Exception):  # only vector environments with processes have `get_attr`
        specs = env.get_attr("spec")
        return bool(specs) and all(getattr(s, "max_episode_steps", None) for s in specs)
    return False


def _of_spec(env: Any) -> bool:
    spec = getattr(env, "spec", None)
    return bool(getattr(spec, "max_episode_steps", None))


def _of_config(env: Any) -> bool:
    config = getattr(env, "config", None)
    return isinstance(config, dict) and bool(config.get("max_episode_steps"))


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
