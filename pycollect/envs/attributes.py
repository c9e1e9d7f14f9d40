"""Attributes of an environment that are looked up as quickly as before anybody saw its `__dict__`.

CPython 3.11 and 3.12 keep the attributes of an object beside it until somebody asks for its
`__dict__`, which TorchRL's GymEnv and GymWrapper do. From then on each look-up goes through a dict
that shares its keys with others, which the interpreter has no short way for: a step of CartPole,
which is little else, takes an eighth longer. For a dict of its own it has one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

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
