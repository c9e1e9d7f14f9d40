"""Refuse to set unknown attributes on a collector."""

from __future__ import annotations

import difflib
import inspect
from typing import Any


class OwnAttributes:
    """Setting an unknown attribute raises AttributeError, so that typing errors are noticed.

    Allowed are attributes of the class (properties decide for themselves), annotated names, and
    names that start with "_". A user's subclass may set other names, unless they resemble an
    attribute of the collector.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        cls = type(self)
        if name[:1] != "_" and not any(
            name in vars(kind) or name in inspect.get_annotations(kind) for kind in cls.__mro__
        ):
            members = inspect.getmembers(cls, lambda own: isinstance(own, property))
            settable = [name for name, own in members if name[0] != "_" and own.fset is not None]
            near = difflib.get_close_matches(name, settable, n=1, cutoff=0.8)
            if near or cls.__module__.startswith("pycollect."):
                hint = f"did you mean {near[0]!r}?" if near else f"it has {settable}."
                raise AttributeError(
                    f"{cls.__name__} has no settable attribute {name!r}; {hint} In your own "
                    "subclass, annotate new attributes or start their names with '_'"
                )
        super().__setattr__(name, value)
