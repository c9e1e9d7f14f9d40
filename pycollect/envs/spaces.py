"""Leaves of Gymnasium spaces, and conversions between nested values and arrays in leaf order."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces

from pycollect._core import Leaf
from pycollect.data.extras import Extra, Kind
from pycollect.data.layout import Key, dtype_name, show, torch_dtype

Array: TypeAlias = npt.NDArray[Any]
Space: TypeAlias = gymnasium.Space[Any]

RESERVED_KEYS = frozenset(
    {"action", "collector", "done", "next", "reward", "step_count", "terminated", "truncated"}
)
"""Top-level keys of a batch that belong to the collector."""

RESERVED_OBSERVATIONS = RESERVED_KEYS - {"step_count"}
"""Top-level keys that an observation may not use; "step_count" only with `max_frames_per_traj`."""

_NUMERIC = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_NESTS = (spaces.Dict, spaces.Tuple)
_FEW = 16  # below this size, Python compares numbers faster than numpy


def leaf_spaces(space: Space, root: Key, what: str) -> tuple[tuple[Leaf, Space], ...]:
    """Return the leaves of `space` below the key `root`, each with its own space.

    The space is a Box, Discrete, MultiDiscrete or MultiBinary, or a nest of Dict and Tuple of them.
    Spaces without a fixed shape and numeric dtype are left out, see `extra_spaces`. `what`,
    "observation_space" or "action_space", is for error messages.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        children = _children(space, root, what)
        return tuple(leaf for key, child in children for leaf in leaf_spaces(child, key, what))
    if _is_extra(space):
        return ()
    return ((_leaf(space, root, what), space),)


def _children(
    space: spaces.Dict | spaces.Tuple[Any], root: Key, what: str
) -> list[tuple[Key, Space]]:
    if not space.spaces:
        raise ValueError(
            f"{what}: expected at least one entry at {show(root)}, got the empty {space}"
        )
    if isinstance(space, spaces.Tuple):
        return [((*root, str(i)), child) for i, child in enumerate(space.spaces)]
    for key in space.spaces:
        if not isinstance(key, str):
            raise ValueError(
                f"{what}: expected strings as keys of a Dict space, got {key!r} in {space}; "
                "rename it with a wrapper"
            )
    return [((*root, key), child) for key, child in space.spaces.items()]


def _is_extra(space: Space) -> bool:
    """Return whether values of `space` have no fixed shape and numeric dtype."""
    return isinstance(space, gymnasium.Space) and not isinstance(space, (*_NUMERIC, *_NESTS))


def _leaf(space: Space, key: Key, what: str) -> Leaf:
    if not isinstance(space, gymnasium.Space):
        raise TypeError(f"{what}: expected a gymnasium.Space at {show(key)}, got {space!r}")
    assert space.dtype is not None  # spaces without a dtype are extras
    try:
        name = dtype_name(space.dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{what}: expected a dtype that torch supports, got {space.dtype} in {space} "
            f"at {show(key)}"
        ) from error
    return Leaf(key, name, tuple(int(n) for n in space.shape or ()))


def extra_spaces(
    space: Space, root: Key, what: str = "observation_space"
) -> tuple[tuple[Extra, Space], ...]:
    """Return an extra for each space that `leaf_spaces` leaves out.

    A Sequence of Box, Discrete, MultiDiscrete or MultiBinary becomes a ragged extra, a tensor
    [n, *feature]. The values of any other space are objects.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        children = _children(space, root, what)
        return tuple(extra for key, child in children for extra in extra_spaces(child, key, what))
    if not _is_extra(space):
        return ()
    if isinstance(space, spaces.Sequence) and isinstance(space.feature_space, _NUMERIC):
        feature = _leaf(space.feature_space, root, what)
        shape, dtype = (-1, *feature.shape), torch_dtype(feature.dtype)
        return ((Extra(root, Kind.RAGGED, dtype, shape), space),)
    return ((Extra(root), space),)


def observation_leaves(space: Space) -> tuple[Leaf, ...]:
    """Return the leaves of an env's observation space, in the space's order."""
    root = _observation_root(space)
    leaves = tuple(leaf for leaf, _ in leaf_spaces(space, root, "observation_space"))
    for key in [entry.key for entry in leaves] + [e.key for e in observation_extras(space)]:
        if key[0] in RESERVED_OBSERVATIONS:
            raise ValueError(
                f"observation_space: the key {key[0]!r} of {space} is reserved for the collector; "
                "rename it with a wrapper (reserved keys: "
                f"{', '.join(sorted(RESERVED_OBSERVATIONS))})"
            )
    return leaves


def observation_extras(space: Space) -> tuple[Extra, ...]:
    """Return the extras of an env's observation space, in the space's order."""
    return tuple(extra for extra, _ in extra_spaces(space, _observation_root(space)))


def _observation_root(space: Space) -> Key:
    return () if isinstance(space, spaces.Dict | spaces.Tuple) else ("observation",)


def action_leaves(space: Space) -> tuple[Leaf, ...]:
    """Return the leaves of an action space: ("action",), or ("action", k, ...) if nested."""
    for extra, child in extra_spaces(space, ("action",), "action_space"):
        raise ValueError(
            "action_space: expected Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple "
            f"of them, got {child} at {show(extra.key)}; encode it with "
            "gymnasium.wrappers.TransformAction"
        )
    return tuple(leaf for leaf, _ in leaf_spaces(space, ("action",), "action_space"))


def make_flatten(space: Space, extras: bool = False) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function from a value of `space` to its entries in leaf order, or to its extras.

    The function raises a ValueError if an entry of the space is missing.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        named = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return _flatten_children(
            [
                (key, str(key), make_flatten(child, extras) if isinstance(child, _NESTS) else None)
                for key, child in named
                if has_any(child, extras)
            ]
        )
    return (lambda value: (value,)) if has_any(space, extras) else (lambda value: ())


def has_any(space: Space, extras: bool) -> bool:
    """Return whether the space has extras, or leaves if not `extras`."""
    if isinstance(space, spaces.Dict):
        return any(has_any(child, extras) for child in space.spaces.values())
    if isinstance(space, spaces.Tuple):
        return any(has_any(child, extras) for child in space.spaces)
    return _is_extra(space) == extras


def _flatten_children(
    children: list[tuple[Any, str, Callable[[Any], tuple[Any, ...]] | None]],
) -> Callable[[Any], tuple[Any, ...]]:
    """Return `flatten` for entries with their own functions; ``None`` for entries of one leaf."""

    def flatten_each(value: Any) -> tuple[Any, ...]:
        flat: list[Any] = []
        for index, name, child in children:
            try:
                entry = value[index]
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(
                    f"observation: expected the entry {name!r} of the observation space, got "
                    f"{describe(value)}"
                ) from error
            flat.extend((entry,) if child is None else child(entry))
        return tuple(flat)

    if not children or any(child is not None for _, _, child in children):
        return flatten_each
    get, is_one = operator.itemgetter(*(index for index, _, _ in children)), len(children) == 1

    def flatten(value: Any) -> tuple[Any, ...]:
        try:
            entries = get(value)
        except (KeyError, IndexError, TypeError):
            return flatten_each(value)  # its error names the entry
        return (entries,) if is_one else entries

    return flatten


def make_read_extras(space: Space) -> Callable[[Any], Sequence[Any]]:
    """Return a function from a value of one environment's `space` to the values of its extras."""
    flatten = make_flatten(space, extras=True)
    extras = observation_extras(space)
    if all(extra.kind is not Kind.RAGGED for extra in extras):
        return flatten
    reads = [_read(extra) for extra in extras]
    return lambda value: [read(entry) for read, entry in zip(reads, flatten(value), strict=True)]


def make_read_rows(space: Space) -> Callable[[Any], list[list[Any]]]:
    """Return a function from a vector environment's observation to one list of values per extra."""
    flatten = make_flatten(space, extras=True)
    reads = [_read(extra) for extra in observation_extras(space)]
    return lambda value: [
        [read(row) for row in rows] for read, rows in zip(reads, flatten(value), strict=True)
    ]


def _read(extra: Extra) -> Callable[[Any], Any]:
    if extra.kind is not Kind.RAGGED:
        return lambda value: value
    dtype, feature = np.dtype(dtype_name(extra.dtype)), extra.shape[1:]

    def read(value: Any) -> torch.Tensor:
        try:
            return torch.from_numpy(np.array(value, dtype).reshape(len(value), *feature))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"observation: {show(extra.key)}: expected a sequence of {dtype} "
                f"{list(feature)}, as in the observation space, got {describe(value)}"
            ) from error

    return read


def make_unflatten(space: Space) -> Callable[[Sequence[Any]], Any]:
    """Return a function from entries in leaf order to a value of `space` (or a batch of it)."""
    if not isinstance(space, _NESTS):
        return operator.itemgetter(0)
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


def conform(value: Any, leaf: Leaf, shape: tuple[int, ...], env: Any = "the environment") -> Array:
    """Return `value` as an array of the leaf's dtype and of `shape`, see `cast_safely`.

    Args:
        shape: `leaf.shape`, after the batch dimension if there is one.
        env: The environment, or its name. Formatted only for an error, because `str` may be slow.
    """
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:  # TypeError: a tensor of a dtype that NumPy lacks
        raise ValueError(
            f"observation: {show(leaf.key)}: expected {leaf.dtype} {list(shape)}, as in the "
            f"observation space of {env}, got {describe(value)}"
        ) from error
    if array.shape != shape:
        raise ValueError(
            f"observation: {show(leaf.key)}: expected shape {list(shape)}, as in the "
            f"observation space of {env}, got {list(array.shape)} ({array.dtype})"
        )
    cast = cast_safely(array, leaf.dtype)
    if cast is not None:
        return cast
    raise ValueError(
        f"observation: {show(leaf.key)}: expected {leaf.dtype}, as in the observation space of "
        f"{env}, got {array.dtype}, which cannot be cast safely. Correct the space, or convert the "
        "observation with gymnasium.wrappers.TransformObservation"
    )


def check_real(array: Array, name: str, env: Any = "the environment") -> Array:
    """Return the array; raise a TypeError if a value is no real number, or None."""
    if array.dtype.kind not in "biufO" or any(value is None for value in array.flat):
        raise TypeError(f"{name}: expected numbers from {env}, got an array of {array.dtype}")
    return array


def cast_safely(array: Array, name: str) -> Array | None:
    """Return the array in the dtype `name`, or ``None`` if the cast is not safe.

    A cast is safe if numpy calls it "same_kind" and integers keep their values.
    """
    dtype = np.dtype(name)
    if array.dtype == dtype and array.dtype.isnative:
        return array
    if array.dtype.kind in "iub" and dtype.kind in "iub":
        cast = array.astype(dtype)
        return cast if np.array_equal(cast, array) else None
    return array.astype(dtype) if np.can_cast(array.dtype, dtype, "same_kind") else None


def action_cast(leaf: Leaf, given: np.dtype[Any]) -> Callable[[Array], Array]:
    """Return a function that casts actions to the dtype of the action space.

    A float loses its fraction in an integer dtype. A value never wraps around, and a finite value
    never becomes infinite: the function raises a ValueError with the action's key and the value.
    """
    dtype = np.dtype(leaf.dtype)
    if np.can_cast(given, dtype, "safe") or dtype.kind == "c":
        return lambda array: array.astype(dtype)
    below, above = _limits(dtype)
    keeps_infinity = dtype.kind == "f"

    def cast(array: Array) -> Array:
        # `.item()`, because Python compares 2.0**63 with the int64 limits exactly.
        if array.size < _FEW or not (below < array.min().item() and array.max().item() < above):
            check(array)
        return array.astype(dtype)

    def check(array: Array) -> None:
        for value in array.ravel().tolist():
            if below < value < above or (keeps_infinity and not math.isfinite(value)):
                continue
            span = "" if keeps_infinity else f" ({below + 1} to {above - 1})"
            raise ValueError(
                f"policy: {show(leaf.key)}: {dtype}{span}, the dtype of the action space, "
                f"cannot hold {value} ({given}); clip the action in the policy"
            )

    return cast


def _limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return an exclusive lower and upper bound of the values that the dtype holds."""
    if dtype.kind == "f":
        above = math.nextafter(float(np.finfo(dtype).max), math.inf)
        return -above, above
    if dtype.kind == "b":
        return -1, 2
    return int(np.iinfo(dtype).min) - 1, int(np.iinfo(dtype).max) + 1


def describe(value: Any) -> str:
    """Return `value` and its type for an error message, in one short line."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {list(value)}"
    text = repr(value)
    return f"{text if len(text) <= 120 else text[:117] + '...'} ({type(value).__name__})"
