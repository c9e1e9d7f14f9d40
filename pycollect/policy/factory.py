"""Policies that are built where they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def build(factory: Callable[[], Any]) -> Any:
    """What the factory returns; TypeError if that is no policy."""
    policy = factory()
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(
            f"policy_factory: expected it to return a module or a callable, but {policy!r} came"
        )
    return policy
