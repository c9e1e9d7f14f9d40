"""Environments by id."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec

from .registrations import of_main


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
