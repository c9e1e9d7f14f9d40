"""Gymnasium ids, time limits, and faster attributes of environments."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec

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
        target: Id or spec of the environment.

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
