"""Attributes of attributes by their written path, as TorchRL writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PART = re.compile(r"\[([^\]]+)\]|([^.\[\]]+)")


def resolved(start: Any, path: str) -> Any:
    """What stands at "policy.module[0].weight" or "env.specs['action']" from `start` on.

    Raises:
        AttributeError: there is no such attribute; it names the path up to there.
        KeyError, IndexError: no such entry.
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
    """What the function at a path returns; the value there, where it is none and nothing is given.

    Raises:
        ValueError: arguments for what cannot be called.
    """
    value = resolved(start, path)
    if callable(value):
        return value(*args, **kwargs)
    if args or kwargs:
        raise ValueError(f"{path}: expected something to call, got {type(value).__name__}")
    return value


def calls(
    list_of_args: Sequence[Sequence[Any]] | None,
    list_of_kwargs: Sequence[Mapping[str, Any]] | None,
    workers: int | None,
) -> list[tuple[Sequence[Any], Mapping[str, Any]]]:
    """The arguments of each call of `map_fn`, none where none are given.

    Args:
        workers: how many calls there are; None: as many as are given, one where none are.

    Raises:
        ValueError: the lists are of other lengths.
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
            f"list_of_args, list_of_kwargs: Expected {workers} argument entries, one for each "
            f"worker, got {count}"
        )
    return list(zip(args, kwargs, strict=True))


def mapped(
    start: Any, path: str, each: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
) -> list[Any]:
    """What the function at a path returns for each of these arguments.

    Raises:
        AttributeError: it is no function.
    """
    function: Callable[..., Any] = resolved(start, path)
    if not callable(function):
        raise AttributeError(f"{path}: expected a method, got {type(function).__name__}")
    return [function(*args, **kwargs) for args, kwargs in each]
