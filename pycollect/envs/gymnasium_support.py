"""Gymnasium ids, time limits, and the speed of attributes of an environment."""

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

from pycollect.envs.registrations import of_main

_IS_SLOW = (3, 11) <= sys.version_info < (3, 13)
_OWNERS = 3  # of a dict that nobody keeps: the object, the name in `_quicken`, `getrefcount` itself


def quicken(env: Any) -> None:
    """Give each environment of a chain of wrappers a dict of its own, where nobody keeps the old.

    Args:
        env: the outermost; what is within is its attribute `env`.
    """
    if _IS_SLOW:
        for own in _chain(env):
            _quicken(own)


def _chain(env: Any) -> Iterator[Any]:
    while env is not None:
        yield env
        env = getattr(env, "__dict__", {}).get("env")


def _quicken(env: Any) -> None:
    attributes = getattr(env, "__dict__", None)
    if type(attributes) is dict and sys.getrefcount(attributes) == _OWNERS:
        object.__setattr__(env, "__dict__", {**attributes})


def maker(name: str, what: str | EnvSpec) -> Callable[..., gymnasium.Env[Any, Any]]:
    """Return a callable that makes a registered environment, in any process.

    Args:
        name: Name of the argument, for errors.
        what: Id or spec of the environment.

    Raises:
        gymnasium.error.Error: No environment has that id; the message suggests similar ids.
        ImportError, TypeError, ValueError: The module in ``module:id`` cannot be imported.
    """
    try:
        spec = what if isinstance(what, EnvSpec) else _spec(what)
        return partial(gymnasium.make, replace(spec, entry_point=of_main(spec.entry_point)))
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise type(error)(f"{name}: expected a Gymnasium id, got {what!r}: {error}") from None


def _spec(env_id: str) -> EnvSpec:
    """As `gymnasium.make` finds it: ``module:id`` by importing, the newest where no version is."""
    module, colon, own = env_id.rpartition(":")
    if colon:
        importlib.import_module(module)
    if own in gymnasium.registry:
        return gymnasium.spec(own)
    namespace, name, version = registration.parse_env_id(own)
    newest = registration.find_highest_version(namespace, name)
    if version is not None or newest is None:
        return gymnasium.spec(own)
    found = registration.get_env_id(namespace, name, newest)
    gymnasium.logger.warn(f"Using the latest versioned environment `{found}` instead of `{own}`.")
    return gymnasium.spec(found)


def has_time_limit(env: Any) -> bool:
    """Whether one can tell that no episode goes on for ever.

    Gymnasium's `spec.max_episode_steps` tells it, of all envs of a vector env, and EnvPool's
    `config`. False where it is not known.
    """
    if _of_spec(env) or _of_config(env):
        return True
    inner = getattr(env, "envs", None)
    if isinstance(inner, list | tuple) and inner:
        return all(map(has_time_limit, inner))
    with contextlib.suppress(Exception):  # a vector env of processes, or no such thing
        specs = env.get_attr("spec")
        return bool(specs) and all(getattr(s, "max_episode_steps", None) for s in specs)
    return False


def _of_spec(env: Any) -> bool:
    spec = getattr(env, "spec", None)
    return bool(getattr(spec, "max_episode_steps", None))


def _of_config(env: Any) -> bool:
    config = getattr(env, "config", None)
    return isinstance(config, dict) and bool(config.get("max_episode_steps"))
