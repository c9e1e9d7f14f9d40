"""Compressed results of a worker: each array is compressed, other values are unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pycollect.data.compression import PackedArray, import_lz4

_ARGUMENT = "compress_data_to_send"


@dataclass(frozen=True)
class Packed:
    """A value with compressed arrays and tensors; :func:`unpack` restores it.

    Tuple unpacking also restores it: ``data, info = packed``.

    Attributes:
        content: The value, with a PackedArray in place of each array and tensor.
    """

    content: Any

    def __iter__(self) -> Iterator[Any]:
        return iter(unpack(self))


def pack(value: Any) -> Packed:
    """Compress each array and tensor in dicts, lists and tuples by LZ4.

    Arrays that would not get smaller, and objects of other types, are kept uncompressed without a
    copy.

    Args:
        value: Any nesting of dicts, lists and tuples.

    Returns:
        The compressed value.

    Raises:
        ImportError: LZ4 is not installed.
    """
    check_lz4()
    return Packed(_each(value, _packed))


def unpack(packed: Any) -> Any:
    """Restore the value that was passed to :func:`pack`; return other values unchanged.

    Args:
        packed: A :class:`Packed`, or any other value.

    Returns:
        The value, with tensors on the CPU.
    """
    return _each(packed.content, _opened) if isinstance(packed, Packed) else packed


def check_lz4() -> None:
    """Raise ImportError if LZ4 is not installed."""
    import_lz4(_ARGUMENT)


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        return PackedArray.of(value, _ARGUMENT)
    return value


def _opened(value: Any) -> Any:
    return value.open(_ARGUMENT) if isinstance(value, PackedArray) else value


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the value with each leaf of its dicts, lists and tuples changed."""
    if type(value) is dict:
        return {key: _each(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_each(item, change) for item in value)
    return change(value)
