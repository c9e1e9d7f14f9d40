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
    """A callable that makes that environment wherever it is called.

    Args:
        name: of the argument that it came in.
        what: its id, or its spec.

    Raises:
        gymnasium.error.Error: there is none of that id; the text names the nearest.
        ImportError, TypeError, ValueError: the module in front of it is not to be had, or none.
    """
    try:
        spec = what if isinstance(what, EnvSpec) else _spec(what)
        return partial(gymnasium.make, replace(spec, entry_point=of_main(spec.entry_point)))
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise type(error)(f"{name}: expected an id of Gymnasium's, got {what!r}: {error}") from None


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
