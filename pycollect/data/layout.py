"""Key paths, dtype names and nested nodes, with which leaves are described."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Key = tuple[str, ...]
"""Path of a leaf in a batch, such as ``("next", "reward")``."""

_TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    )
}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
"""Names of the numeric dtypes of torch."""


@dataclass(frozen=True)
class Node:
    """A nested TensorDict with its own batch dimensions or class."""

    shape: tuple[int, ...] = ()  # batch dimensions after those of the batch, such as agents
    data_cls: Any = None  # the tensorclass, or ``None`` for a TensorDict


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with that name; raise a KeyError if it is unknown."""
    return _TORCH_DTYPES[name]


def dtype_name(dtype: torch.dtype | np.dtype | type) -> str:
    """Return the name of a torch or numpy dtype in a :class:`Leaf`."""
    name = NAMES.get(dtype) if isinstance(dtype, torch.dtype) else np.dtype(dtype).name
    if name not in _TORCH_DTYPES:
        raise ValueError(f"dtype: expected a numeric dtype, got {dtype}")
    return name


def signed_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bits in a dtype that torch can index and unpickle.

    In torch 2.13, uint16, uint32 and uint64 support neither.
    """
    return tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))


def is_delivered(key: Key) -> bool:
    """Return whether batches contain the key; a part that starts with "_" is for policies only."""
    return not any(part.startswith("_") for part in key)


def as_key(key: Any) -> Key:
    """Return a key of tensordict, a string or nested tuple of strings, as a flat tuple."""
    return (
        (key,) if isinstance(key, str) else tuple(part for inner in key for part in as_key(inner))
    )


def show(key: Key) -> str:
    """Return a key for messages as users write it: a string, or a tuple if it is nested."""
    return repr(key[0] if len(key) == 1 else key) if key else "the top level"


def show_all(keys: Iterable[Key]) -> str:
    """Return keys for an error message, separated by commas; "none" if there are no keys."""
    return ", ".join(map(show, keys)) or "none"


def overlap(a: Key, b: Key) -> bool:
    """Return whether two keys are equal, or one is inside the other."""
    return a[: len(b)] == b[: len(a)]


def dotted(key: Key) -> str:
    """Return a key for error messages, such as ``"next.reward"``."""
    return ".".join(key)
