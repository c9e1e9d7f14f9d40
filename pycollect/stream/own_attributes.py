"""Refuse to set unknown attributes on a collector."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

_NEAR = 0.8


class OwnAttributes:
    """Setting an unknown attribute raises AttributeError, so that typing errors are noticed.

    Allowed are attributes of the class (properties decide for themselves), annotated names, and
    names that start with "_". A user's subclass may set other names, unless they resemble an
    attribute of the collector.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name[:1] != "_" and not hasattr(type(self), name):
            _check_declared(type(self), name)
        super().__setattr__(name, value)


def _check_declared(cls: type, name: str) -> None:
    if any(name in inspect.get_annotations(kind) for kind in cls.__mro__):
        return
    settable = [own for own in dir(cls) if _is_settable(cls, own)]
    near = difflib.get_close_matches(name, settable, n=1, cutoff=_NEAR)
    if not near and not cls.__module__.startswith("pycollect."):
        return
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, settable))}."
    raise AttributeError(
        f"{cls.__name__} has no settable attribute {name!r}; {hint} In your own subclass, annotate "
        "new attributes or start their names with '_'"
    )


def _is_settable(cls: type, name: str) -> bool:
    own = getattr(cls, name)
    return not name.startswith("_") and isinstance(own, property) and own.fset is not None
