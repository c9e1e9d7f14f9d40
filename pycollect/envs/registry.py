"""Environments by id, also in processes that never ran what registered them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec

Registered = Mapping[str, EnvSpec]
"""What was registered, by id."""


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
        return partial(gymnasium.make, what if isinstance(what, EnvSpec) else _spec(what))
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


def registered_here() -> Registered:
    """What this program registered beside Gymnasium's own, but for what does not pickle."""
    own = {name: spec for name, spec in gymnasium.registry.items() if not _is_gymnasiums(spec)}
    if not _pickles(own):
        own = {name: spec for name, spec in own.items() if _pickles(spec)}
    return own


def register(specs: Registered) -> None:
    """Register those whose ids are free here."""
    for name, spec in specs.items():
        gymnasium.registry.setdefault(name, spec)


def _is_gymnasiums(spec: EnvSpec) -> bool:
    place = spec.entry_point
    module = place if isinstance(place, str) else getattr(place, "__module__", None)
    return str(module).partition(".")[0] == "gymnasium"


def _pickles(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # whatever an entry point's own pickling raises
        return False
    return True
