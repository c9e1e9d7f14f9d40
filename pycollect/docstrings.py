"""Complete docstrings that share parts of their text with others."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

_SECTION = re.compile(r"^(Args|Returns|Yields|Raises):\n", re.M)
_ENTRY = re.compile(r"^ {4}(?=\S)", re.M)


def completed_by(base: Any = None, *, raises: bool = True) -> Callable[[T], T]:
    """Complete a docstring by another one, of a function or class.

    "Args:" of a class is that of its constructor, if this has one. Otherwise "Args:" gets an entry
    for each parameter, in order: its own, else the other's. "Raises:" gets its own entries and the
    other's for further types. "Returns:", "Yields:" and the text before all sections are its own,
    else the other's. An entry named "..." is removed; it shows readers of the source that entries
    are added.

    Args:
        base: Object with the other docstring, if any.
        raises: Whether to add the other's "Raises:".
    """

    def decorated(own: T) -> T:
        given, other = own.__doc__, getattr(base, "__doc__", None)
        if given is not None:  # as with -OO
            parameters = inspect.signature(own).parameters  # type: ignore[arg-type]
            rest = _parts(other) if base is not None and other is not None else {}
            init = own.__init__.__doc__ if isinstance(own, type) else None  # type: ignore[misc]
            parts = {**_parts(given), **{k: v for k, v in _parts(init or "").items() if k}}
            own.__doc__ = _merged(parts, rest if raises else {**rest, "Raises": ""}, parameters)
        return own

    return decorated


def _parts(docstring: str) -> dict[str, str]:
    """Return the sections by name, still indented, and the text before them as ""."""
    text, *others = _SECTION.split(inspect.cleandoc(docstring))
    return {"": text.strip(), **dict(zip(others[::2], others[1::2], strict=True))}


def _entries(section: str) -> dict[str, str]:
    """Return the text of each entry by the names before its colon."""
    entries = (entry.partition(":") for entry in _ENTRY.split(section)[1:])
    return {names: text.rstrip() for names, _, text in entries}


def _merged(own: dict[str, str], base: dict[str, str], parameters: Iterable[str]) -> str:
    known = {**_entries(base.get("Args", "")), **_entries(own.get("Args", ""))}
    by_name = {name.strip(): names for names in known for name in names.split(",")}
    arguments = dict.fromkeys(by_name[name] for name in parameters if name in by_name)
    raised = {**_entries(own.get("Raises", "")), **_entries(base.get("Raises", ""))}
    raised.update(_entries(own.get("Raises", "")))
    parts = [
        own[""] or base.get("", ""),
        _section("Args", {names: known[names] for names in arguments}),
    ]
    for name in ("Returns", "Yields"):
        text = own.get(name) or base.get(name)
        parts.append(f"{name}:\n{text.rstrip()}" if text else "")
    parts.append(_section("Raises", raised))
    return "\n\n".join(part for part in parts if part)


def _section(name: str, entries: dict[str, str]) -> str:
    lines = "\n".join(f"    {names}:{text}" for names, text in entries.items())
    return f"{name}:\n{lines}" if lines else ""
