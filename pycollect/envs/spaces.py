"""Gymnasium spaces as leaves, and the way between nested values and arrays in leaf order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from pycollect._core import Leaf
from pycollect.layout import Key, dtype_name

Array: TypeAlias = npt.NDArray[Any]
Space: TypeAlias = gymnasium.Space[Any]

RESERVED_KEYS = frozenset(
    {
        "action",
        "collector",
        "done",
        "next",
        "reward",
        "step_count",
        "terminated",
        "truncated",
    }
)
"""Top-level keys of a batch that an observation may not use (CONTRACT.md, section 4)."""

_NUMERIC = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_RAGGED = (spaces.Text, spaces.Sequence, spaces.Graph)


def leaf_spaces(space: Space, root: Key, what: str) -> tuple[tuple[Leaf, Space], ...]:
    """Return the leaves of `space` below the key `root`, each with its own space.

    Args:
        space: a Box, Discrete, MultiDiscrete or MultiBinary, or a nest of Dict and Tuple of them.
        root: the key of `space` itself.
        what: "observation_space" or "action_space", for error messages.

    Raises:
        ValueError: a space of another kind, an empty Dict or Tuple, a Dict key that is no string,
            a dtype that tensors do not have.
        NotImplementedError: a Text, Sequence or Graph space.
        TypeError: `space` is no Gymnasium space.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        children = _children(space, root, what)
        return tuple(leaf for key, child in children for leaf in leaf_spaces(child, key, what))
    return ((_leaf(space, root, what), space),)


def _children(
    space: spaces.Dict | spaces.Tuple[Any], root: Key, what: str
) -> list[tuple[Key, Space]]:
    if not space.spaces:
        raise ValueError(
            f"{what}: expected at least one entry in {_name(root)}, got the empty {space}"
        )
    if isinstance(space, spaces.Tuple):
        return [((*root, str(i)), child) for i, child in enumerate(space.spaces)]
    for key in space.spaces:
        if not isinstance(key, str):
            raise ValueError(
                f"{what}: expected strings as keys of a Dict space, got {key!r} in {space}; "
                "rename it with gymnasium.wrappers.TransformObservation"
            )
    return [((*root, key), child) for key, child in space.spaces.items()]


def _leaf(space: Space, key: Key, what: str) -> Leaf:
    if isinstance(space, _RAGGED):
        raise NotImplementedError(
            f"{what}: {space} at {_name(key)} has no fixed shape and numeric dtype; such leaves "
            "are not supported yet. Drop or encode it, for example with "
            "gymnasium.wrappers.FilterObservation or TransformObservation"
        )
    if not isinstance(space, gymnasium.Space):
        raise TypeError(f"{what}: expected a gymnasium.Space at {_name(key)}, got {space!r}")
    if not isinstance(space, _NUMERIC):
        raise ValueError(
            f"{what}: expected Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of "
            f"them, got {space} at {_name(key)}; convert it with a wrapper, for example "
            "gymnasium.wrappers.TransformObservation or TransformAction"
        )
    try:
        name = dtype_name(space.dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{what}: expected a dtype that tensors have, got {space.dtype} in {space} "
            f"at {_name(key)}"
        ) from error
    return Leaf(key, name, tuple(int(n) for n in space.shape or ()))


def observation_leaves(space: Space) -> tuple[Leaf, ...]:
    """Return the leaves of an env's observation space, in the space's order.

    Raises:
        ValueError: a top-level key is one of `RESERVED_KEYS`; and as `leaf_spaces`.
        NotImplementedError: as `leaf_spaces`.
    """
    nested = isinstance(space, spaces.Dict | spaces.Tuple)
    root = () if nested else ("observation",)
    leaves = tuple(leaf for leaf, _ in leaf_spaces(space, root, "observation_space"))
    for leaf in leaves:
        if leaf.key[0] in RESERVED_KEYS:
            raise ValueError(
                f"observation_space: the key {leaf.key[0]!r} belongs to the collector (reserved: "
                f"{', '.join(sorted(RESERVED_KEYS))}), got it in {space}; rename it with a wrapper"
            )
    return leaves


def action_leaves(space: Space) -> tuple[Leaf, ...]:
    """Return the leaves of an env's action space: ("action",), or ("action", k, ...) when nested.

    Raises:
        ValueError, NotImplementedError: as `leaf_spaces`.
    """
    return tuple(leaf for leaf, _ in leaf_spaces(space, ("action",), "action_space"))


def make_flatten(space: Space) -> Callable[[Any], tuple[Any, ...]]:
    """Return the function from a value of `space` (or a batch of it) to its entries in leaf order.

    The function raises ValueError where an entry that the space has is missing.
    """
    if isinstance(space, spaces.Dict):
        return _flatten_children([(k, k, make_flatten(s)) for k, s in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return _flatten_children([(i, str(i), make_flatten(s)) for i, s in enumerate(space.spaces)])
    return lambda value: (value,)


def _flatten_children(
    children: list[tuple[Any, str, Callable[[Any], tuple[Any, ...]]]],
) -> Callable[[Any], tuple[Any, ...]]:
    def flatten(value: Any) -> tuple[Any, ...]:
        flat: list[Any] = []
        for index, name, child in children:
            try:
                entry = value[index]
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(
                    f"observation: expected an entry {name!r}, which the space declares, "
                    f"got {describe(value)}"
                ) from error
            flat.extend(child(entry))
        return tuple(flat)

    return flatten


def make_unflatten(space: Space) -> Callable[[Sequence[Any]], Any]:
    """Return the function from entries in leaf order to a value of `space` (or a batch of it)."""
    build = _builder(space)
    return lambda flat: build(iter(flat))


def _builder(space: Space) -> Callable[[Any], Any]:
    if isinstance(space, spaces.Dict):
        named = [(key, _builder(child)) for key, child in space.spaces.items()]
        return lambda entries: {key: child(entries) for key, child in named}
    if isinstance(space, spaces.Tuple):
        children = [_builder(child) for child in space.spaces]
        return lambda entries: tuple(child(entries) for child in children)
    return next


def conform(value: Any, leaf: Leaf, shape: tuple[int, ...], env: str = "the env") -> Array:
    """Return `value` as an array of the leaf's dtype and of `shape`, cast if that is safe.

    Safe are casts that numpy calls "same_kind", except that integers must keep their values.

    Args:
        value: what the env returned: array, scalar or sequence.
        leaf: what its space declares.
        shape: `leaf.shape`, with the batch dimension before it for a batch.
        env: who returned it, for error messages.

    Raises:
        ValueError: another shape, or a dtype that cannot be cast.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"observation {_name(leaf.key)}: expected {leaf.dtype} {list(shape)}, as the space of "
            f"{env} declares, got {describe(value)}"
        ) from error
    if array.shape != shape:
        raise ValueError(
            f"observation {_name(leaf.key)}: expected shape {list(shape)}, as the space of {env} "
            f"declares, got {list(array.shape)} ({array.dtype})"
        )
    dtype = np.dtype(leaf.dtype)
    if array.dtype == dtype and array.dtype.isnative:
        return array
    if array.dtype.kind in "iub" and dtype.kind in "iub":
        cast = array.astype(dtype)
        if np.array_equal(cast, array):
            return cast
    elif np.can_cast(array.dtype, dtype, "same_kind"):
        return array.astype(dtype)
    raise ValueError(
        f"observation {_name(leaf.key)}: expected {leaf.dtype}, as the space of {env} declares, "
        f"got {array.dtype}, which cannot be cast to it safely; correct the space or convert the "
        "observation with gymnasium.wrappers.TransformObservation"
    )


def conform_scalar(value: Any, leaf: Leaf, env: str = "the env") -> int:
    """Return an integer observation of shape () as a Python int.

    Raises:
        ValueError: `value` is no integer (a numpy scalar or array of shape () is one).
    """
    try:
        return operator.index(value)
    except TypeError as error:
        raise ValueError(
            f"observation {_name(leaf.key)}: expected an integer, as the space of {env} declares, "
            f"got {describe(value)}"
        ) from error


def _name(key: Key) -> str:
    return repr(key[0] if len(key) == 1 else key) if key else "the top"


def describe(value: Any) -> str:
    """Return `value` and its type for an error message, in one short line."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {list(value)}"
    text = repr(value)
    return f"{text if len(text) <= 120 else text[:117] + '...'} ({type(value).__name__})"
