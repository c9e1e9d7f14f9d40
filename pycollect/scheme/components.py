"""Names of a worker's components and their replacement; devices and shares."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from typing import Any

import torch

from pycollect.data.devices import check_available, named_device
from pycollect.scheme import names

ATTRIBUTES = {
    names.ENV_TRAIN: "envs_train",
    names.ENV_TEST: "envs_test",
    names.ACTOR: "actor",
    names.ALGORITHM: "algo",
    names.STORAGE: "storage",
}
"""Attributes of a worker by component name, in the order of construction."""

_HELD_AS = {"envs_train": "envs", "actor": "actor", "algo": "algo"}
"""Attribute names by which components refer to each other."""


def nothing(*_: Any) -> None:
    """Make no environments."""


def attribute_of(component_name: str) -> str:
    """Return the worker attribute of a component, given its name or the attribute itself.

    Raises:
        AttributeError: The component is unknown.
    """
    known = {**ATTRIBUTES, **{attribute: attribute for attribute in ATTRIBUTES.values()}}
    if component_name not in known:
        raise unknown("component_name", component_name, known)
    return known[component_name]


def check_made(factory: str, component: Any, protocol: type) -> Any:
    """Return a component from a factory after checking the members of its Protocol.

    Raises:
        TypeError: A member is missing.
    """
    members = [name for name in vars(protocol) if not name.startswith("_")]
    lacks = [name for name in members if not hasattr(component, name)]
    if lacks:
        raise TypeError(
            f"{factory}: expected to return an object with all members of "
            f"pycollect.scheme.{protocol.__name__}, got {type(component).__name__} without "
            f"{', '.join(lacks)}"
        )
    return component


def hand_over(owner: Any, old: Any, new: Any, attribute: str) -> None:
    """Replace the old component by the new one in a component that refers to it."""
    held_as = _HELD_AS.get(attribute)
    if owner is not None and held_as and getattr(owner, held_as, None) is old is not None:
        setattr(owner, held_as, new)


def check_parameter(argument: str, owner: Any, name: str) -> None:
    """Raise AttributeError if a component has no such attribute."""
    if not hasattr(owner, name):
        raise unknown(argument, name, [known for known in dir(owner) if not known.startswith("_")])


def unknown(argument: str, name: str, known: Collection[str]) -> AttributeError:
    """Return the error for an unknown name."""
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    expected = f"one of {sorted(known)}" if len(known) < 12 else "a known name"
    return AttributeError(f"{argument}: expected {expected}, got {name!r}{hint}")


def device_of(name: str, device: Any) -> torch.device:
    """Return the torch device of an argument; ``None`` means CUDA if available, else the CPU.

    Raises:
        ValueError: The value is not a device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return named_device(name, device)


def device_here(name: str, device: Any) -> torch.device:
    """Return the device like `device_of`, if this process has it.

    Raises:
        ValueError: The value is not a device, or this process does not have it.
    """
    own = device_of(name, device)
    check_available(name, own)
    return own


def share(fraction: float, count: int) -> int:
    """Return the smallest number that is at least this fraction of `count`."""
    return math.ceil(fraction * count - 1e-9)  # 0.7 * 10 is 7, despite its rounding error
