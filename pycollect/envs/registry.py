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


def maker(name: str, env_id: str) -> Callable[..., gymnasium.Env[Any, Any]]:
    """A callable that makes that environment wherever it is called.

    Args:
        name: of the argument that the id came in.

    Raises:
        gymnasium.error.Error: there is none of that id; the text names the nearest.
        ImportError: the module in front of it is not to be had.
    """
    try:
        return partial(gymnasium.make, _spec(env_id))
    except (gymnasium.error.Error, ImportError) as error:
        raise type(error)(
            f"{name}: expected an id of Gymnasium's, got {env_id!r}: {error}"
        ) from None


def _spec(env_id: str) -> EnvSpec:
    """As `gymnasium.make` finds it: ``module:id`` by importing, the newest where no version is."""
    module, _, own = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    namespace, name, version = registration.parse_env_id(own)
    if version is None and own not in gymnasium.registry:
        version = registration.find_highest_version(namespace, name)
    return gymnasium.spec(registration.get_env_id(namespace, name, version))


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
