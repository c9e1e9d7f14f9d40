"""Finds the part of an object that cannot be pickled for a worker."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from pycollect.transport.pickling import pickle_with_inherited

_DEPTH = 8


def unpicklable(value: Any) -> tuple[str, str] | None:
    """Return the path to the smallest part that cannot be pickled, and the error.

    The path is "" for the value itself, else for example ``.simulator.lock``. ``None`` is returned
    if the value can be pickled.
    """
    error = _error_of(value)
    if error is None:
        return None
    path = ""
    for _ in range(_DEPTH):
        for name, part in _parts(value):
            inner = _error_of(part)
            if inner is not None:
                path, value, error = path + name, part, inner
                break
        else:
            break
    return path, error


def _error_of(value: Any) -> str | None:
    try:
        pickle_with_inherited(value)
    except Exception as error:  # an object's own pickling may raise anything
        return f"{type(error).__name__}: {error}"
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object that are pickled with it, and how to reach each."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", own) for key, own in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{i}]", own) for i, own in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((f".args[{i}]", own) for i, own in enumerate(value.args))
        yield from ((f".keywords[{key!r}]", own) for key, own in value.keywords.items())
        yield ".func", value.func
    elif (code := getattr(value, "__code__", None)) is not None:
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            yield f" (variable {name!r})", cell.cell_contents
        for name in code.co_names:
            if name in value.__globals__:
                yield f" (global {name!r})", value.__globals__[name]
    elif (owner := getattr(value, "__self__", None)) is not None:
        yield ".__self__", owner
    else:
        attributes = getattr(value, "__dict__", {})
        yield from ((f".{name}", own) for name, own in list(attributes.items()))
