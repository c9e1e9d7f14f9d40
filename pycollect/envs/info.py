"""Record selected entries of Gymnasium's info under "next"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from pycollect._core import Leaf
from pycollect.data.extras import Extra, ExtraValues
from pycollect.data.layout import Key, dtype_name, overlap, show, show_all
from pycollect.envs.base import Arrays, BoolArray, EnvBatch, EnvSpec, random_step
from pycollect.envs.info_rows import NOTHING
from pycollect.envs.spaces import RESERVED_OBSERVATIONS, Array, cast_safely, describe
from pycollect.errors import warn_user

InfoKey: TypeAlias = str | tuple[str, ...]
AskedInfo: TypeAlias = Sequence[InfoKey] | Mapping[InfoKey, torch.dtype | None]
"""The argument `info_keys`: strings, or tuples for nested dicts, optionally with dtypes."""

InfoKeys: TypeAlias = Mapping[Key, str | None]
"""Recorded entries with the names of their dtypes; ``None`` takes the dtype of the first step."""

_PYTHON_DTYPES = {float: "float32", complex: "complex64"}
"""Default dtypes of Python numbers, as in torch rather than numpy."""


def check_info_keys(value: Any) -> InfoKeys:
    """Return `info_keys` as key paths, with their dtypes if it is a dict."""
    if value is None:
        return {}
    if isinstance(value, str) or not isinstance(value, Sequence | Mapping):
        raise TypeError(
            f"info_keys: expected a list of keys, or a dict from keys to dtypes, got {value!r}"
        )
    keys: dict[Key, str | None] = {}
    for name in value:
        key = _checked_key(name)
        other = next((other for other in keys if overlap(key, other)), None)
        if other is not None:
            raise ValueError(
                f"info_keys: expected keys that do not overlap, got {show(other)} and {show(key)}"
            )
        keys[key] = _checked_dtype(value[name]) if isinstance(value, Mapping) else None
    return keys


def _checked_key(name: Any) -> Key:
    key = (name,) if isinstance(name, str) else name
    if not isinstance(key, tuple) or not key or not all(isinstance(k, str) for k in key):
        raise TypeError(f"info_keys: expected strings or tuples of strings, got {name!r}")
    if key[0] in RESERVED_OBSERVATIONS:
        raise ValueError(
            f"info_keys: the key {key[0]!r} is reserved for the collector (reserved keys: "
            f"{', '.join(sorted(RESERVED_OBSERVATIONS))})"
        )
    return key


def _checked_dtype(value: Any) -> str | None:
    if value is None:
        return None
    try:
        return str(np.dtype(dtype_name(value)))  # bfloat16 is torch's alone
    except (KeyError, TypeError, ValueError):
        raise TypeError(
            f"info_keys: expected a numeric dtype that numpy supports, got {value!r}"
        ) from None


def _check_not_taken(keys: InfoKeys, spec: EnvSpec) -> None:
    leaves = (*spec.observation, *spec.step_only, *spec.action)
    taken = [leaf.key for leaf in leaves] + [extra.key for extra in spec.extras]
    for key in keys:
        if any(overlap(key, other) for other in taken):
            raise ValueError(
                f"info_keys: {show(key)} overlaps another key of the batch; other keys: "
                f"{show_all(taken)}"
            )


class InfoEnv(EnvBatch):
    """An EnvBatch whose steps also return entries of its infos: `step_only` and `step_extras`.

    One step with a random action determines the form of each entry; reset the environment
    afterwards. Numbers and arrays of numbers become leaves; Python floats become float32 and
    complex numbers complex64, as in torch. An entry with a requested dtype is always a leaf, and a
    scalar if that step lacks it. Other entries become extras, with a warning if that step lacks
    them.

    A leaf is zero in steps whose info lacks the entry. If no info had the entry up to the end of
    the first episode, a warning is issued.
    """

    def __init__(self, env: EnvBatch, keys: InfoKeys) -> None:
        read = env.tap_info()
        if read is None:
            raise ValueError(
                "info_keys: expected environments of Gymnasium or PettingZoo; for TorchRL "
                "environments, call set_info_dict_reader() instead"
            )
        _check_not_taken(keys, env.spec)
        self.original = env.original
        self._env, self._read, self.owned = env, read, [env]
        same = ("bind_outputs", "random_action", "action_sampler", "send")
        for name in (*same, "steps_rows", "overlaps", "time_limit"):
            setattr(self, name, getattr(env, name))
        inner = env.spec
        self._single = len(inner.observation) + len(inner.step_only) == 1
        entries = self._probe(keys)
        self._leaves = tuple(entry for entry in entries if isinstance(entry, Leaf))
        extras = tuple(entry for entry in entries if isinstance(entry, Extra))
        step_only = (*inner.step_only, *self._leaves)
        self.spec = replace(inner, step_only=step_only, step_extras=extras)
        self._num_envs, self._rows, self._ends = inner.num_envs, inner.rows, inner.ends
        self._zeros = tuple(
            np.zeros((*self._rows, *leaf.shape), leaf.dtype) for leaf in self._leaves
        )
        self._are_plain = tuple(map(_plain_numbers, self._leaves))
        self._stepped = False

    def _probe(self, keys: InfoKeys) -> list[Leaf | Extra]:
        random_step(self._env)
        self._env.reset()
        found = {key: [v for v in self._read(key) if v is not NOTHING] for key in keys}
        absent = [key for key, values in found.items() if not values]
        self._unseen = [key for key in absent if keys[key]]
        objects = [key for key in absent if not keys[key]]
        entries = [
            _entry(key, values, keys[key], self._env.info_shape(key))
            for key, values in found.items()
        ]
        for entry in entries:
            if isinstance(entry, Extra) and self._env.info_shape(entry.key):
                raise ValueError(
                    f"info_keys: {show(entry.key)}: expected numbers or arrays of equal shapes "
                    f"in the infos of the first step, got {found[entry.key] or 'none'}; pass a "
                    f"dtype if numbers come later, for example {_argument({entry.key: 'float32'})}"
                )
        if objects:
            suggested = {**keys, **dict.fromkeys(objects, "float32")}
            warn_user(
                f"info_keys: the first step's info has no {show_all(objects)}, so objects are "
                "recorded (None for missing entries). To record tensors, pass a dtype, for example "
                f"{_argument(suggested)}"
            )
        return entries

    def truncate_after(self, frames: int) -> bool:
        truncates = self._env.truncate_after(frames)
        self.spec = replace(self.spec, observation=self._env.spec.observation)
        return truncates

    @property
    def draws_ahead(self) -> bool:
        return self._env.draws_ahead

    def current_extras(self) -> ExtraValues:
        values = dict(self._env.current_extras())
        if self._stepped:
            for extra in self.spec.step_extras:
                rows = self._read(extra.key)
                values[extra.key] = [None if value is NOTHING else value for value in rows]
        return values

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        self._stepped = False
        return self._with(self._env.reset(seeds), self._zeros)

    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        return self._informed(self._env.step(action))

    def step_rows(self, action: Arrays, rows: BoolArray) -> tuple[Arrays, Any, Any, Any]:
        return self._informed(self._env.step_rows(action, rows))

    def receive(self) -> tuple[Arrays, Any, Any, Any]:
        return self._informed(self._env.receive())

    def _informed(self, result: tuple[Arrays, Any, Any, Any]) -> tuple[Arrays, Any, Any, Any]:
        observation, reward, terminated, truncated = result
        self._stepped = True
        if self._unseen:
            flags = [terminated, truncated]
            if self._ends:
                pairs = zip(self._env.spec.observation, observation, strict=False)
                flags = [array for leaf, array in pairs if leaf.key in self._ends]
            self._look_for_unseen(any(map(np.any, flags)))
        values = tuple(map(self._array, self._leaves, self._are_plain))
        return self._with(observation, values), reward, terminated, truncated

    def _look_for_unseen(self, ended: bool) -> None:
        """Warn once about missing keys when an episode has ended; many keys appear only then."""
        self._unseen = [
            key for key in self._unseen if all(value is NOTHING for value in self._read(key))
        ]
        if ended and self._unseen:
            warn_user(
                f"info_keys: no info had {show_all(self._unseen)} up to the end of an episode, so "
                "zeros are recorded; check the spelling. Name an entry of a nested dict by a "
                "tuple, for example ('episode', 'r')"
            )
            self._unseen = []

    def reset_done(self, done: BoolArray) -> Arrays:
        observation = self._env.reset_done(done)
        self._stepped = False
        return self._with(observation, self._zeros)

    def _with(self, observation: Arrays, values: tuple[Array, ...]) -> Arrays:
        return (*((observation,) if self._single else observation), *values)

    def _array(self, leaf: Leaf, is_plain: Callable[[Any], bool]) -> Array:
        values = self._read(leaf.key)
        shape = (self._num_envs, *leaf.shape)
        if isinstance(values, np.ndarray) and values.shape == shape:
            cast = cast_safely(values, leaf.dtype)
            if cast is not None:
                return np.array(cast)
        rows = np.zeros(shape, leaf.dtype)
        for row, value in enumerate(values):
            if is_plain(value):
                rows[row] = value
            elif value is not NOTHING:
                rows[row] = _conform(value, leaf)
        # The ellipsis keeps an array; the recorder would take a scalar for a real number.
        return rows if self._rows else rows[0, ...]


def _plain_numbers(leaf: Leaf) -> Callable[[Any], bool]:
    """Return a fast test for Python numbers that the leaf holds without a cast, the usual case."""
    dtype = np.dtype(leaf.dtype)
    if leaf.shape:
        return lambda value: False
    if dtype.kind in "fc":
        return lambda value: type(value) is float
    if dtype.kind == "b":
        return lambda value: type(value) is bool
    limits = np.iinfo(dtype)
    least, most = int(limits.min), int(limits.max)
    return lambda value: type(value) is int and least <= value <= most


def _argument(keys: InfoKeys) -> str:
    """Return the text of an argument that requests these keys."""
    entries = (f"{show(key)}: {name and f'torch.{name}'}" for key, name in keys.items())
    return f"info_keys={{{', '.join(entries)}}}"


def _entry(
    key: Key, values: Sequence[Any], dtype: str | None, absent: tuple[int, ...]
) -> Leaf | Extra:
    """Return the form of an entry; with a dtype but without a value, it has the shape `absent`."""
    arrays = [array for array in map(_as_array, values) if array is not None]
    if dtype is not None:
        return Leaf(key, dtype, arrays[0].shape if arrays else absent)
    if not arrays or len(arrays) < len(values) or len({array.shape for array in arrays}) > 1:
        return Extra(key)
    name = _PYTHON_DTYPES.get(type(values[0]), dtype_name(arrays[0].dtype))
    return Leaf(key, name, arrays[0].shape)


def _as_array(value: Any) -> Array | None:
    """Return a number or an array of numbers as an array, or ``None`` for any other value."""
    if not isinstance(value, bool | int | float | complex | np.generic | np.ndarray):
        return None
    array = np.asarray(value)
    try:
        dtype_name(array.dtype)
    except (TypeError, ValueError):
        return None
    return array


def _conform(value: Any, leaf: Leaf) -> Array:
    array = _as_array(value)
    if array is None:
        why = (
            "convert it in the environment or in a wrapper to a number or a numpy array of a dtype "
            "that torch supports"
        )
    elif array.shape != leaf.shape:
        why = (
            f"its shape {list(array.shape)} differs from {list(leaf.shape)}, that of the first "
            "step, or of a number if the first step had no such entry"
        )
    else:
        cast = cast_safely(array, leaf.dtype)
        if cast is not None:
            return cast
        why = _why_not_cast(array, leaf)
    raise ValueError(
        f"info_keys: expected {leaf.dtype} of shape {list(leaf.shape)} for {show(leaf.key)}, "
        f"got {describe(value)}; {why}"
    )


def _why_not_cast(array: Array, leaf: Leaf) -> str:
    values = f"{array.dtype} values"
    if array.dtype.kind in "iub":  # the other integer dtype cannot hold some of the values
        values = str(array[array != array.astype(leaf.dtype)][0])
    return (
        f"{leaf.dtype} cannot hold {values}, so pass another dtype, for example "
        f"{_argument({leaf.key: dtype_name(array.dtype)})}"
    )
