"""Arrays and tensors compressed by LZ4, one by one, on their way to another node."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Buffer = npt.NDArray[np.uint8]

_SMALL = 1024  # bytes, for which it is not worth the call
_WORTH = 0.9  # of its bytes are left at most, or it travels as it is


def import_lz4(argument: str) -> ModuleType:
    """Return LZ4's module; raise ImportError, naming the argument, if it is not installed."""
    try:
        import lz4.frame
    except ImportError as error:
        raise ImportError(f"{argument}: LZ4 is not installed; run pip install lz4") from error
    frame: ModuleType = lz4.frame
    return frame


def compress(data: Buffer, argument: str) -> Buffer:
    """Bytes as one frame of LZ4, or as they are where that would not be much smaller."""
    if data.nbytes < _SMALL:
        return data
    lz4 = import_lz4(argument)
    packed: bytes = lz4.compress(data, store_size=True, block_size=lz4.BLOCKSIZE_MAX4MB)
    if len(packed) >= _WORTH * data.nbytes:
        return data
    return np.frombuffer(packed, np.uint8)


def decompress(data: Buffer, size: int, argument: str) -> Buffer:
    """Return the `size` bytes that `compress` compressed, in new memory."""
    if data.nbytes == size:  # those that would not have got smaller
        return np.array(data)
    opened: bytearray = import_lz4(argument).decompress(data, return_bytearray=True)
    if len(opened) != size:
        raise ValueError(f"{argument}: expected an LZ4 frame with {size} bytes, got {len(opened)}")
    return np.frombuffer(opened, np.uint8)


@dataclass(frozen=True)
class PackedArray:
    """An array or a tensor that is compressed, if that makes it smaller.

    Attributes:
        dtype: numpy's of an array, torch's of a tensor.
        shape: of either.
        size: its bytes.
        data: these, compressed or not.
    """

    dtype: np.dtype[Any] | torch.dtype
    shape: tuple[int, ...]
    size: int
    data: Buffer

    @classmethod
    def of(cls, value: npt.NDArray[Any] | Tensor, argument: str) -> PackedArray:
        """Pack one; a tensor elsewhere comes to the CPU."""
        raw = _bytes_of(value)
        return cls(value.dtype, tuple(value.shape), raw.nbytes, compress(raw, argument))

    def open(self, argument: str) -> npt.NDArray[Any] | Tensor:
        """The array, or the tensor on the CPU, that was packed, in memory of its own."""
        raw = decompress(self.data, self.size, argument)
        if isinstance(self.dtype, torch.dtype):
            if not self.size:  # which torch does not view as anything else
                return torch.empty(self.shape, dtype=self.dtype, device="cpu")
            return torch.from_numpy(raw).view(self.dtype).reshape(self.shape)
        return raw.view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class PackedBuffer:
    """A block of memory whose parts are compressed, each if that makes it smaller.

    Attributes:
        sizes: bytes of the parts.
        lengths: what is left of these.
        data: all parts, compressed or not, one after the other: one array travels faster than many.
    """

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    data: Buffer

    @classmethod
    def of(cls, data: Buffer, sizes: tuple[int, ...], argument: str) -> PackedBuffer:
        """Pack a block that has parts of so many bytes, one after the other."""
        parts = [compress(part, argument) for part in _parts(data, sizes)]
        return cls(sizes, tuple(part.nbytes for part in parts), np.concatenate(parts))

    def open(self, argument: str) -> Buffer:
        """The block, in memory of its own."""
        block = np.empty(sum(self.sizes), np.uint8)
        both = zip(_parts(block, self.sizes), _parts(self.data, self.lengths), strict=True)
        for own, part in both:
            size = own.nbytes
            own[:] = part if part.nbytes == size else decompress(part, size, argument)
        return block


def _parts(data: Buffer, sizes: tuple[int, ...]) -> list[Buffer]:
    """Parts of so many bytes, one after the other."""
    ends = accumulate(sizes)
    return [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _bytes_of(value: npt.NDArray[Any] | Tensor) -> Buffer:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        array: Buffer = flat.view(torch.uint8).numpy()
        return array
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
