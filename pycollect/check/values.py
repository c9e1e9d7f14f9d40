"""Observations: copies, comparisons, and their differences from a space."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces

from pycollect.check.report import ERROR, WARNING, Draft
from pycollect.data.layout import Key, show
from pycollect.envs.spaces import describe, extra_spaces, leaf_spaces, make_flatten

Space: TypeAlias = spaces.Space[Any]

_INTEGERS = "iub"
_TOLERANCE = 1e-5  # Gymnasium's
_ROUNDING = 1e-6


def copied(value: Any) -> Any:
    """Return a copy of a nest of arrays; other objects are not copied."""
    if isinstance(value, Mapping):
        return {key: copied(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return tuple([copied(entry) for entry in value])
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return np.array(value) if isinstance(value, np.ndarray) else value


def is_equal(a: Any, b: Any, tolerance: float = 0.0) -> bool:
    """Return whether two nests have equal values; NaN equals NaN."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(is_equal(a[k], b[k], tolerance) for k in a)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(is_equal, a, b, [tolerance] * len(a)))
    try:
        x, y = np.asarray(a), np.asarray(b)
        if x.shape != y.shape or "O" in (x.dtype.char, y.dtype.char):
            return x.shape == y.shape and (a is b or bool(a == b))
        if x.dtype.kind not in "fc":
            return bool(np.array_equal(x, y))
        return bool(np.allclose(x, y, tolerance, tolerance, equal_nan=True))
    except Exception:  # the comparison of some objects is not a bool
        return type(a) is type(b)


def is_close(a: Any, b: Any) -> bool:
    """Return whether two nests are equal up to rounding."""
    return is_equal(a, b, _TOLERANCE)


def make_check(space: Space, envs: int | None = None) -> Callable[[Any, str, Draft], None]:
    """Return a function that compares an observation with the space; `envs` rows of it if given."""
    numeric = [(leaf.key, child) for leaf, child in leaf_spaces(space, (), "observation_space")]
    others = [(extra.key, child) for extra, child in extra_spaces(space, ())]
    flatten, flatten_others = make_flatten(space), make_flatten(space, extras=True)
    rows = () if envs is None else (envs,)

    def check(observation: Any, where: str, report: Draft) -> None:
        try:
            values, extras = flatten(observation), flatten_others(observation)
        except ValueError as error:
            report.add("observation-space", f"{where}: {error}")
            return
        for (key, child), value in zip(numeric, values, strict=True):
            shape = (*rows, *(child.shape or ()))
            _check_entry(_Entry(report, where, key, child, shape), value)
        for (key, child), value in zip(others, extras, strict=True):
            entry = _Entry(report, where, key, child, rows)
            for one in value if rows else [value]:
                if one not in child:
                    entry.add(
                        "observation-space", f"{describe(one)}, which {child} does not contain"
                    )

    return check


@dataclass(frozen=True)
class _Entry:
    report: Draft
    where: str
    key: Key
    space: Space
    shape: tuple[int, ...]

    def add(self, code: str, text: str, severity: str = ERROR) -> None:
        which = f"the observation {show(self.key)}" if self.key else "an observation"
        text = f"{self.where} returned {which} {text}"
        self.report.add(code, text, severity, about=str(self.key))


def _check_entry(entry: _Entry, value: Any) -> None:
    """Compare shape, dtype and values of one entry with its space, until one of them differs."""
    if entry.shape == () and entry.space.dtype is not None and entry.space.dtype.kind in "iu":
        try:
            value = np.asarray(operator.index(value))
        except TypeError:
            entry.add("observation-dtype", f"{describe(value)}; {entry.space} has integers")
            return
    try:
        array = np.asarray(value)
    except ValueError:
        entry.add("observation-shape", f"{describe(value)}, which is no array")
        return
    if array.shape != entry.shape:
        entry.add(
            "observation-shape",
            f"of shape {list(array.shape)}; {entry.space} has the shape {list(entry.shape)}",
        )
    elif _has_dtype(entry, value, array) and _is_finite(entry, array):
        _check_bounds(entry, array)


def _has_dtype(entry: _Entry, value: Any, array: np.ndarray[Any, Any]) -> bool:
    dtype = np.dtype(entry.space.dtype)
    if not isinstance(value, np.ndarray | np.generic | torch.Tensor) and entry.shape:
        text = f"that is a {type(value).__name__} instead of an array of {dtype}"
        entry.add("observation-dtype", text, WARNING)
        return True
    if array.dtype == dtype or not isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return True
    both_integers = array.dtype.kind in _INTEGERS and dtype.kind in _INTEGERS
    if both_integers and not isinstance(entry.space, spaces.Box):
        return True
    is_safe = np.can_cast(array.dtype, dtype)
    text = f"of dtype {array.dtype}; the space has {dtype}"
    entry.add("observation-dtype", text, WARNING if is_safe else ERROR)
    return is_safe or np.can_cast(array.dtype, dtype, "same_kind")


def _is_finite(entry: _Entry, array: np.ndarray[Any, Any]) -> bool:
    if array.dtype.kind not in "fc":
        return True
    if np.isnan(array).any():
        entry.add("not-finite", f"with NaN{_at(np.isnan(array))}")
        return False
    if np.isinf(array).any():
        entry.add("not-finite", f"with an infinite value{_at(np.isinf(array))}", WARNING)
    return True


def _check_bounds(entry: _Entry, array: np.ndarray[Any, Any]) -> None:
    low, high = _bounds(entry.space)
    for outside, bound, word in ((array < low, low, "below"), (array > high, high, "above")):
        if np.any(outside):
            place = tuple(np.argwhere(outside)[0])
            limit = np.broadcast_to(bound, array.shape)[place]
            text = f"with {array[place]}{_at(outside)}, which is {word} the space's {limit}"
            by_rounding = abs(float(array[place]) - float(limit)) <= _ROUNDING * max(
                1.0, abs(limit)
            )
            entry.add("observation-bounds", text, WARNING if by_rounding else ERROR)


def _bounds(space: Space) -> tuple[Any, Any]:
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return 0, 1


def _at(where: Any) -> str:
    place = np.argwhere(where)[0].tolist()
    return f" at {place}" if place else ""


def size_of(value: Any, depth: int = 6) -> int:
    """Return the number of values in a nest of containers and arrays."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return int(value.size)
    if depth and isinstance(value, Mapping):
        return len(value) + sum(size_of(entry, depth - 1) for entry in value.values())
    if depth and isinstance(value, list | tuple | set | frozenset):
        return len(value) + sum(size_of(entry, depth - 1) for entry in value)
    return len(value) if isinstance(value, str | bytes) else 1
