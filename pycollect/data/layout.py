"""Key paths and dtype names: the vocabulary in which leaves are described."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Key = tuple[str, ...]
"""The path of a leaf in a batch, e.g. ``("next", "reward")``."""

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
_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Node:
    """A nested TensorDict that is more than a group of keys.

    Attributes:
        shape: its batch dimensions behind those of the batch (agents, say).
        data_cls: the tensorclass that it is; None for a TensorDict.
    """

    shape: tuple[int, ...] = ()
    data_cls: Any = None


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name; KeyError for an unknown one."""
    return _TORCH_DTYPES[name]


def dtype_name(dtype: torch.dtype | np.dtype | type) -> str:
    """Return the name of a torch or numpy dtype in a :class:`Leaf`.

    Raises ``ValueError`` if the dtype is not numeric.
    """
    name = _NAMES.get(dtype) if isinstance(dtype, torch.dtype) else np.dtype(dtype).name
    if name not in _TORCH_DTYPES:
        raise ValueError(f"dtype: expected a numeric dtype, got {dtype}")
    return name


def is_delivered(key: Key) -> bool:
    """False for keys with a part that starts with '_': only a policy sees them."""
    return not any(part.startswith("_") for part in key)


def dotted(key: Key) -> str:
    """``"next.reward"``, for messages."""
    return ".".join(key)
