"""Messages between two ranks: Python values, whose arrays travel as they are."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import cloudpickle
import numpy as np
import torch

from pycollect.engines.messages import Buffer

_HEAD_BYTES = 1024  # of the first message of a value: most have no second one
_HEAD = struct.Struct("<QQ")  # bytes of what follows it, arrays beside it
_SIZE = struct.Struct("<Q")
_FOR_EVER = timedelta(days=10_000)  # a learner may take its time; a death breaks the connection


class LinkBrokenError(Exception):
    """Nothing can be sent or received any more."""


class Sent:
    """A value on its way. It is to be kept until the other one has it."""

    def __init__(self, works: Sequence[tuple[Any, Any]]) -> None:
        self._works = works

    def wait(self) -> None:
        """Until the other one has it. LinkBrokenError where it never will."""
        for work, _ in self._works:
            _wait(work)


class Link:
    """One end of a group of two. One thread may receive while others send, one at a time.

    Args:
        group: of torch.distributed.
        peer: the other one's rank.
    """

    def __init__(self, group: Any, peer: int) -> None:
        self._group = group
        self._peer = peer
        self._head = torch.empty(_HEAD_BYTES, dtype=torch.uint8)

    def send(self, value: Any) -> Sent:
        """Send a value, and do not wait.

        Raises:
            LinkBrokenError: it has no other end any more.
            Exception: the value does not pickle.
        """
        data, arrays = _pickled(value)
        sizes = b"".join(_SIZE.pack(array.nbytes) for array in arrays)
        whole = bytearray(_HEAD.pack(len(sizes) + len(data), len(arrays)) + sizes + data)
        head, rest = whole[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0"), whole[_HEAD_BYTES:]
        parts: list[Any] = [np.frombuffer(part, np.uint8) for part in (head, rest) if part]
        return Sent([self._post(part) for part in (*parts, *arrays) if part.nbytes])

    def _post(self, array: Buffer) -> tuple[Any, Any]:
        tensor = torch.from_numpy(array)
        try:
            return self._group.send([tensor], self._peer, 0), tensor
        except RuntimeError as error:
            raise LinkBrokenError(str(error)) from error

    def receive(self) -> Any:
        """The next value; its arrays lie in memory of their own. Waits.

        Raises:
            LinkBrokenError: none can come any more.
        """
        self._fill(self._head)
        head = self._head.numpy()
        length, count = _HEAD.unpack_from(head.data)
        data = np.empty(length, np.uint8)
        here = min(length, _HEAD_BYTES - _HEAD.size)
        data[:here] = head[_HEAD.size : _HEAD.size + here]
        if length > here:
            self._fill(torch.from_numpy(data[here:]))
        sizes = [_SIZE.unpack_from(data.data, place * _SIZE.size)[0] for place in range(count)]
        arrays = [np.empty(size, np.uint8) for size in sizes]
        for array in arrays:
            if array.nbytes:
                self._fill(torch.from_numpy(array))
        return pickle.loads(data[count * _SIZE.size :].data, buffers=arrays)

    def _fill(self, tensor: torch.Tensor) -> None:
        try:
            work = self._group.recv([tensor], self._peer, 0)
        except RuntimeError as error:
            raise LinkBrokenError(str(error)) from error
        _wait(work)


def _wait(work: Any) -> None:
    try:
        work.wait(_FOR_EVER)
    except RuntimeError as error:
        raise LinkBrokenError(str(error)) from error


def _pickled(value: Any) -> tuple[bytes, list[Buffer]]:
    """A value, and the arrays that it refers to, flat and as bytes."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    except Exception:  # it can more, but takes ten times as long
        buffers = []
        data = cloudpickle.dumps(value, 5, buffer_callback=buffers.append)
    return data, [_writable(np.frombuffer(buffer.raw(), np.uint8)) for buffer in buffers]


def _writable(array: Buffer) -> Buffer:
    """The same, or a copy where it cannot be written: torch warns of such, though it only reads."""
    return array if array.flags.writeable else array.copy()
