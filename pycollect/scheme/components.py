"""What the components of a worker are called, and how one takes another's place."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

from pycollect.scheme import names

ATTRIBUTES = {
    names.ENV_TRAIN: "envs_train",
    names.ENV_TEST: "envs_test",
    names.ACTOR: "actor",
    names.ALGORITHM: "algo",
    names.STORAGE: "storage",
}
"""Attributes of a worker by the names of its components, in the order in which they are made."""

_HELD_AS = {"envs_train": "envs", "actor": "actor", "algo": "algo"}
"""As what components hold each other."""


def nothing(*_: Any) -> None:
    """The factory of environments that there are none of."""


def attribute_of(component_name: str) -> str:
    """Which attribute of a worker a component is: by its name, or the attribute's own.

    Raises:
        AttributeError: there is no such component.
    """
    known = {**ATTRIBUTES, **{attribute: attribute for attribute in ATTRIBUTES.values()}}
    if component_name not in known:
        raise unknown("component_name", component_name, known)
    return known[component_name]


def check_made(factory: str, component: Any, protocol: type) -> Any:
    """The component that a factory has made, if it has all that its Protocol has.

    Raises:
        TypeError: it lacks something.
    """
    members = [name for name in vars(protocol) if not name.startswith("_")]
    lacks = [name for name in members if not hasattr(component, name)]
    if lacks:
        raise TypeError(
            f"{factory}: expected it to make what has {', '.join(lacks)}, as every "
            f"{protocol.__name__} of pycollect.scheme; it made {type(component).__name__}"
        )
    return component


def hand_over(owner: Any, old: Any, new: Any, attribute: str) -> None:
    """A component that holds the old one holds the new one from now on."""
    held_as = _HELD_AS.get(attribute)
    if owner is not None and held_as and getattr(owner, held_as, None) is old is not None:
        setattr(owner, held_as, new)


def check_parameter(argument: str, owner: Any, name: str) -> None:
    """Raise AttributeError where a component does not have that attribute."""
    if not hasattr(owner, name):
        raise unknown(argument, name, [known for known in dir(owner) if not known.startswith("_")])


def unknown(argument: str, name: str, known: Collection[str]) -> AttributeError:
    """The error for a name that is none of those."""
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    few = f" of {sorted(known)}" if len(known) < 12 else ""
    return AttributeError(f"{argument}: expected a known name{few}, got {name!r}{hint}")
