"""Compress arrays and tensors with LZ4, before they are sent to another node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pycollect._core import Slab

Buffer = npt.NDArray[np.uint8]

_SMALL = 1024  # bytes; less is not worth the call
_MAX_RATIO = 0.9  # data that compresses less is sent uncompressed


def import_lz4(argument: str = "data") -> ModuleType:
    """Return the module of LZ4; raise an ImportError about `argument` if it is not installed."""
    try:
        import lz4.frame
    except ImportError as error:
        raise ImportError(f"{argument}: LZ4 is not installed; run pip install lz4") from error
    frame: ModuleType = lz4.frame
    return frame


def compress(data: Buffer) -> Buffer:
    """Return the bytes as one LZ4 frame, or unchanged if that is not much smaller."""
    if data.nbytes < _SMALL:
        return data
    lz4 = import_lz4()
    packed: bytes = lz4.compress(data, store_size=True, block_size=lz4.BLOCKSIZE_MAX4MB)
    if len(packed) >= _MAX_RATIO * data.nbytes:
        return data
    return np.frombuffer(packed, np.uint8)


def decompress(data: Buffer, size: int) -> Buffer:
    """Return the `size` bytes that `compress` compressed, in new memory."""
    if data.nbytes == size:  # not compressed
        return np.array(data)
    opened: bytearray = import_lz4().decompress(data, return_bytearray=True)
    if len(opened) != size:
        raise ValueError(f"data: expected an LZ4 frame with {size} bytes, got {len(opened)}")
    return np.frombuffer(opened, np.uint8)


@dataclass(frozen=True)
class PackedArray:
    """An array or a tensor that is compressed if that makes it smaller."""

    dtype: np.dtype[Any] | torch.dtype  # dtype of numpy for an array, of torch for a tensor
    shape: tuple[int, ...]
    size: int  # number of bytes before compression
    data: Buffer  # the bytes, possibly compressed

    @classmethod
    def of(cls, value: npt.NDArray[Any] | Tensor) -> PackedArray:
        """Pack an array or a tensor, which may be on any device."""
        raw = _bytes_of(value)
        return cls(value.dtype, tuple(value.shape), raw.nbytes, compress(raw))

    def open(self) -> npt.NDArray[Any] | Tensor:
        """Return the packed array, or the packed tensor on the CPU, in new memory."""
        raw = decompress(self.data, self.size)
        if isinstance(self.dtype, torch.dtype):
            if not self.size:  # torch cannot view an empty tensor as another dtype
                return torch.empty(self.shape, dtype=self.dtype, device="cpu")
            return torch.from_numpy(raw).view(self.dtype).reshape(self.shape)
        return raw.view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class PackedBuffer:
    """A block of memory in which each part is compressed if that makes it smaller."""

    sizes: tuple[int, ...]  # number of bytes of each part before compression
    lengths: tuple[int, ...]  # number of bytes of each part after compression
    data: Buffer  # concatenated parts, because one array is sent faster than many

    @classmethod
    def of(cls, slab: Slab) -> PackedBuffer:
        """Pack a slab leaf by leaf."""
        sizes = leaf_sizes(slab)
        parts = [compress(part) for part in _parts(slab.array(), sizes)]
        return cls(sizes, tuple(part.nbytes for part in parts), np.concatenate(parts))

    def open(self) -> Buffer:
        """Return the block in new memory."""
        block = np.empty(sum(self.sizes), np.uint8)
        pairs = zip(_parts(block, self.sizes), _parts(self.data, self.lengths), strict=True)
        for target, part in pairs:
            target[:] = part if part.nbytes == target.nbytes else decompress(part, target.nbytes)
        return block


def leaf_sizes(slab: Slab) -> tuple[int, ...]:
    """Return the sizes in bytes of a slab's headers and of each leaf with its padding."""
    whole = slab.array()
    extents = (slab.placement.workers, slab.placement.envs, slab.placement.steps)
    base = whole.ctypes.data
    leaves = slab.tensors(list(extents), torch.Tensor)
    starts = {leaf.data_ptr() - base for leaf in leaves if leaf.numel()}  # else its address is null
    edges = sorted({0, *starts, whole.nbytes})
    return tuple(end - start for start, end in pairwise(edges))


def _parts(data: Buffer, sizes: tuple[int, ...]) -> list[Buffer]:
    """Return the consecutive parts of `data` that have the given sizes."""
    ends = accumulate(sizes)
    return [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _bytes_of(value: npt.NDArray[Any] | Tensor) -> Buffer:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        array: Buffer = flat.view(torch.uint8).numpy()
        return array
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class Packed:
    """A value with compressed arrays and tensors; :func:`unpack` restores it.

    Tuple unpacking also restores it: ``data, info = packed``.
    """

    content: Any  # the value, with a PackedArray in place of each array and tensor

    def __iter__(self) -> Iterator[Any]:
        return iter(unpack(self))


def pack(value: Any) -> Packed:
    """Compress each array and tensor in dicts, lists and tuples by LZ4.

    Arrays that would not get smaller, and objects of other types, are kept uncompressed without a
    copy.

    Args:
        value: Any nesting of dicts, lists and tuples.

    Raises:
        ImportError: LZ4 is not installed.
    """
    import_lz4("pack")
    return Packed(_each(value, _packed))


def unpack(packed: Any) -> Any:
    """Restore a value passed to :func:`pack`, with tensors on the CPU; return others unchanged."""
    return _each(packed.content, _opened) if isinstance(packed, Packed) else packed


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        return PackedArray.of(value)
    return value


def _opened(value: Any) -> Any:
    return value.open() if isinstance(value, PackedArray) else value


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the value with each leaf of its dicts, lists and tuples changed."""
    if type(value) is dict:
        return {key: _each(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_each(item, change) for item in value)
    return change(value)
