"""Attributes of attributes by their written path, as TorchRL writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PART = re.compile(r"\[([^\]]+)\]|([^.\[\]]+)")


def resolved(start: Any, path: str) -> Any:
    """Return the value at a path from `start`, for example "policy.module[0].weight".

    Raises:
        AttributeError: An attribute is missing; the message starts with the path up to it.
        KeyError, IndexError: An entry is missing.
        TypeError: `path` is not a non-empty string.
    """
    if not isinstance(path, str) or not path:
        raise TypeError(f"attr: expected a path like 'env.action_spec', got {path!r}")
    value = start
    for match in _PART.finditer(path):
        entry, name = match.groups()
        if name is None:
            value = value[_index(entry)]
            continue
        try:
            value = getattr(value, name)
        except AttributeError as error:
            raise AttributeError(f"{path[: match.end()]}: {error}") from error
    return value


def _index(entry: str) -> int | str:
    try:
        return int(entry)
    except ValueError:
        return entry.strip("'\"")


def called(start: Any, path: str, *args: Any, **kwargs: Any) -> Any:
    """Call the function at a path; without arguments, return a value that is not callable.

    Raises:
        ValueError: Arguments are given, but the value is not callable.
    """
    value = resolved(start, path)
    if callable(value):
        return value(*args, **kwargs)
    if args or kwargs:
        raise ValueError(f"{path}: expected a callable, got {type(value).__name__}")
    return value


def calls(
    list_of_args: Sequence[Sequence[Any]] | None,
    list_of_kwargs: Sequence[Mapping[str, Any]] | None,
    workers: int | None,
) -> list[tuple[Sequence[Any], Mapping[str, Any]]]:
    """Return the arguments of each call of `map_fn`.

    Args:
        workers: Number of calls. ``None`` means the length of the lists, or 1 without lists.

    Raises:
        ValueError: The lengths of the lists differ from each other or from `workers`.
    """
    given = [entries for entries in (list_of_args, list_of_kwargs) if entries is not None]
    count = len(given[0]) if given else workers or 1
    args = [()] * count if list_of_args is None else list(list_of_args)
    kwargs = [{}] * count if list_of_kwargs is None else list(list_of_kwargs)
    if len(args) != len(kwargs):
        raise ValueError(
            "list_of_args, list_of_kwargs: expected lists of the same length, got "
            f"{len(args)} and {len(kwargs)}"
        )
    if workers is not None and count != workers:
        raise ValueError(
            f"list_of_args, list_of_kwargs: expected one entry per worker ({workers}), got {count}"
        )
    return list(zip(args, kwargs, strict=True))


def mapped(
    start: Any, path: str, each: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
) -> list[Any]:
    """Call the function at a path with each of these arguments and return the results.

    Raises:
        AttributeError: The value at the path is not callable.
    """
    function: Callable[..., Any] = resolved(start, path)
    if not callable(function):
        raise AttributeError(f"{path}: expected a method, got {type(function).__name__}")
    return [function(*args, **kwargs) for args, kwargs in each]
