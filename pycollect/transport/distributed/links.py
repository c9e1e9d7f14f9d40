"""Links between the driver and one rank: a process group of two.

If a rank dies, it takes no other group with it, and a program that trains with torch.distributed
keeps its default group. Weights are therefore sent to each rank. A broadcast would need a group of
all ranks, which does not outlive the death of one.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import cloudpickle
import numpy as np
import torch

from pycollect.transport.distributed.address import SIGNATURE_BYTES, ForgedError, Seal
from pycollect.transport.distributed.meeting import DRIVER, WORKER, Meeting, group_of_two
from pycollect.transport.messages import Buffer


class LinkBrokenError(Exception):
    """Nothing can be sent or received any more."""


class Sent(Protocol):
    """A value on its way. It is to be kept until the other one has it."""

    def wait(self) -> None:
        """Until the other one has it. LinkBrokenError where it never will."""


class Link(Protocol):
    """One end of two. One thread may receive while others send, one at a time."""

    def send(self, value: Any) -> Sent:
        """Send a value, and do not wait.

        Raises:
            LinkBrokenError: it has no other end any more.
            Exception: the value does not pickle.
        """

    def receive(self) -> Any:
        """The next value; its arrays lie in memory of their own. Waits.

        Raises:
            LinkBrokenError: none can come any more.
        """

    def close(self) -> None:
        """Give up what this end holds; whoever waits for the other one is told. Idempotent."""


class Carrier(Protocol):
    """A kind of links. It pickles: the driver tells it to its ranks."""

    @property
    def name(self) -> str:
        """What `stats()` call it."""

    def driver_end(self, meeting: Meeting) -> Link:
        """The driver's end of the link to a rank. Waits for it; raises if it does not come."""

    def rank_end(self, meeting: Meeting) -> Link:
        """The rank's end. Waits for the driver."""


def packed(value: Any) -> tuple[bytes, list[Buffer]]:
    """A value, and the arrays that it refers to, flat, as bytes that can be written."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    except Exception:  # it can more, but takes ten times as long
        buffers = []
        data = cloudpickle.dumps(value, 5, buffer_callback=buffers.append)
    return data, [_writable(np.frombuffer(buffer.raw(), np.uint8)) for buffer in buffers]


def unpacked(data: bytes | memoryview, arrays: Sequence[Buffer]) -> Any:
    """Unpickle the value. Unpickling runs code, so the signature was checked first."""
    return pickle.loads(data, buffers=arrays)


def _writable(array: Buffer) -> Buffer:
    """The same, or a copy where it cannot be written: torch warns of such, though it only reads."""
    return array if array.flags.writeable else array.copy()


_HEAD_BYTES = 1024  # of the first part of a message: most have no second one
_SIGNATURE = f"{SIGNATURE_BYTES}s"
_HEAD = struct.Struct(f"<QQ{_SIGNATURE}")  # bytes of data, number of arrays, signature of the data
_ARRAY = struct.Struct(f"<Q{_SIGNATURE}")  # bytes and signature of an array; data begins with these
_FIRST_BYTES = _HEAD_BYTES - SIGNATURE_BYTES - _HEAD.size  # of data, in the head
_FOR_EVER = timedelta(days=10_000)  # a learner may take its time; a death breaks the connection


@dataclass(frozen=True)
class GroupCarrier:
    """Links that are groups of two.

    Attributes:
        backend: of torch.distributed.
    """

    backend: str
    name: ClassVar[str] = "messages"

    def driver_end(self, meeting: Meeting) -> GroupLink:
        """The driver's end. Waits for the rank."""
        group = group_of_two(self.backend, meeting, DRIVER, meeting.address.host)
        return GroupLink(group, WORKER, meeting.key)

    def rank_end(self, meeting: Meeting) -> GroupLink:
        """The rank's end. Waits for the driver."""
        group = group_of_two(self.backend, meeting, WORKER, meeting.address.own_host())
        return GroupLink(group, DRIVER, meeting.key)


class GroupSent:
    """The messages of a value, on their way."""

    def __init__(self, works: Sequence[tuple[Any, Any]]) -> None:
        self._works = works

    def wait(self) -> None:
        """Until the other one has it. LinkBrokenError where it never will."""
        for work, _ in self._works:
            _wait(work)


class GroupLink:
    """One end of a group of two: a value is a message, and one for each of its arrays.

    Every part of a message is signed, and checked before it is used: torch does not check which
    process has connected to a group.

    Args:
        group: of torch.distributed.
        peer: the other one's rank.
        key: of the signatures, which no other link has.
    """

    def __init__(self, group: Any, peer: int, key: bytes) -> None:
        self._group = group
        self._peer = peer
        self._own = Seal(key, DRIVER + WORKER - peer)
        self._other = Seal(key, peer)
        self._head = torch.empty(_HEAD_BYTES, dtype=torch.uint8, device="cpu")

    def send(self, value: Any) -> GroupSent:
        """Send a value, and do not wait."""
        pickled, arrays = packed(value)
        seal = self._own
        seal.advance()
        signatures = [seal.sign(part, array) for part, array in enumerate(arrays, 2)]
        entries = map(_ARRAY.pack, (array.nbytes for array in arrays), signatures)
        data = b"".join([*entries, pickled])
        first, rest = data[:_FIRST_BYTES], bytearray(data[_FIRST_BYTES:])
        signed = _HEAD.pack(len(data), len(arrays), seal.sign(1, rest)) + first
        signed = signed.ljust(_HEAD_BYTES - SIGNATURE_BYTES, b"\0")
        head = bytearray(seal.sign(0, signed) + signed)
        parts: list[Any] = [np.frombuffer(part, np.uint8) for part in (head, rest) if part]
        return GroupSent([self._post(part) for part in (*parts, *arrays) if part.nbytes])

    def _post(self, array: Buffer) -> tuple[Any, Any]:
        tensor = torch.from_numpy(array)
        try:
            return self._group.send([tensor], self._peer, 0), tensor
        except RuntimeError as error:
            raise LinkBrokenError(str(error)) from error

    def receive(self) -> Any:
        """The next value. Waits."""
        try:
            return unpacked(*self._receive_parts())
        except ForgedError as error:
            raise LinkBrokenError(str(error)) from error

    def _receive_parts(self) -> tuple[memoryview, list[Buffer]]:
        """Receive a pickled value and its arrays; check each size before it is used."""
        self._other.advance()
        self._fill(self._head)
        head = self._head.numpy()
        signed = head[SIGNATURE_BYTES:]
        self._other.check(0, head[:SIGNATURE_BYTES].tobytes(), signed)
        length, count, rest_signature = _HEAD.unpack_from(signed.data)
        data = np.empty(length, np.uint8)
        here = min(length, _FIRST_BYTES)
        data[:here] = signed[_HEAD.size : _HEAD.size + here]
        self._receive_part(1, rest_signature, data[here:])
        arrays = []
        for number in range(count):
            size, array_signature = _ARRAY.unpack_from(data.data, number * _ARRAY.size)
            arrays.append(np.empty(size, np.uint8))
            self._receive_part(2 + number, array_signature, arrays[-1])
        return data[count * _ARRAY.size :].data, arrays

    def _receive_part(self, part: int, given: bytes, array: Buffer) -> None:
        if array.nbytes:
            self._fill(torch.from_numpy(array))
        self._other.check(part, given, array)

    def close(self) -> None:
        """The group ends with its last reference, and the other one sees that."""

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
