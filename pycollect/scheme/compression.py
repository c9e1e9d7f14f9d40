"""What a worker returns, packed: its arrays compressed one by one, all else as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pycollect.batch.compression import PackedArray, import_lz4

_ARGUMENT = "compress_data_to_send"


@dataclass(frozen=True)
class Packed:
    """A value whose arrays and tensors are compressed; :func:`unpack` opens it.

    So does taking it apart: ``data, info = packed``.

    Attributes:
        content: the value, with a PackedArray in the place of each array and tensor.
    """

    content: Any

    def __iter__(self) -> Iterator[Any]:
        return iter(unpack(self))


def pack(value: Any) -> Packed:
    """Compress the arrays and tensors in dicts, lists and tuples, each by LZ4.

    One that would not get smaller stays as it is, in its own memory. Objects of other kinds
    stay, too.

    Raises:
        ImportError: LZ4 is not installed.
    """
    check_lz4()
    return Packed(_each(value, _packed))


def unpack(packed: Any) -> Any:
    """What :func:`pack` was given; tensors are on the CPU. Other values are given back."""
    return _each(packed.content, _opened) if isinstance(packed, Packed) else packed


def check_lz4() -> None:
    """Raise ImportError where LZ4 is not installed."""
    import_lz4(_ARGUMENT)


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        return PackedArray.of(value, _ARGUMENT)
    return value


def _opened(value: Any) -> Any:
    return value.open(_ARGUMENT) if isinstance(value, PackedArray) else value


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with each leaf of its dicts, lists and tuples changed."""
    if type(value) is dict:
        return {key: _each(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_each(item, change) for item in value)
    return change(value)
