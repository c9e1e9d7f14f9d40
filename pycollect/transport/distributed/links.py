"""Links between the driver and one rank: process groups of two.

The death of a rank breaks only its own group, and a program that trains with torch.distributed
keeps its default group. Weights are sent to each rank separately, because a broadcast needs a group
of all ranks, which the death of one would break.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from pycollect.transport.distributed.meeting import (
    DRIVER,
    SIGNATURE_BYTES,
    WORKER,
    ForgedError,
    Meeting,
    Seal,
)
from pycollect.transport.messages import Buffer


class LinkBrokenError(Exception):
    """The link can no longer send or receive."""


@contextmanager
def broken_by(*errors: type[Exception]) -> Iterator[None]:
    """Raise these errors as LinkBrokenError. Torch raises RuntimeError if the other end is gone."""
    try:
        yield
    except errors as error:
        raise LinkBrokenError(str(error)) from error


Sent: TypeAlias = Callable[[], None]
"""A value that is being sent: waits until the other end has it, or raises LinkBrokenError.

Keep it until the other end has the value.
"""


class Link(Protocol):
    """One end of a link. One thread may receive while others send, one at a time."""

    def send(self, value: Any) -> Sent:
        """Send a value without waiting; raise LinkBrokenError if the other end is gone."""

    def receive(self) -> Any:
        """Wait for the next value, with arrays of its own; raise LinkBrokenError if none comes."""

    def close(self) -> None:
        """Release this end's resources and notify the waiting other end. Idempotent."""


class Carrier(Protocol):
    """A kind of link. It pickles, because the driver sends it to its ranks."""

    @property
    def name(self) -> str:
        """Name of the transport in `stats()`."""

    def driver_end(self, meeting: Meeting) -> Link:
        """Wait for a rank; return the driver's end of the link. Raise if the rank does not come."""

    def rank_end(self, meeting: Meeting) -> Link:
        """Wait for the driver and return the rank's end of the link."""


def packed(value: Any) -> tuple[bytes, list[Buffer]]:
    """Pickle a value; return the pickle and its arrays as writable, one-dimensional bytes."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    except Exception:  # cloudpickle can pickle more, but takes ten times as long
        buffers = []
        data = cloudpickle.dumps(value, 5, buffer_callback=buffers.append)
    arrays = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    # Torch warns about read-only arrays.
    return data, [array if array.flags.writeable else array.copy() for array in arrays]


def unpacked(data: bytes | memoryview, arrays: Sequence[Buffer]) -> Any:
    """Unpickle a value. Unpickling runs code, so the caller must have checked the signature."""
    return pickle.loads(data, buffers=arrays)


_HEAD_BYTES = 1024  # size of a message's first part; most messages have no second part
_SIGNATURE = f"{SIGNATURE_BYTES}s"
_HEAD = struct.Struct(f"<QQ{_SIGNATURE}")  # size of data, number of arrays, signature of the rest
_ARRAY = struct.Struct(f"<Q{_SIGNATURE}")  # size and signature of an array, at the start of data
_FIRST_BYTES = _HEAD_BYTES - SIGNATURE_BYTES - _HEAD.size  # maximum size of data in the head
_CONNECT_SECONDS = 30.0  # short, because both processes are already running
_FOREVER = timedelta(days=10_000)  # a learner may be slow; a death breaks the connection


BACKENDS = ("gloo", "nccl", "mpi", "ucc")


def check_backend(name: Any) -> str:
    """Return the name of a backend that can carry messages."""
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(f"backend: expected one of {list(BACKENDS)}, got {name!r}")
    backend = str(name)
    if not dist.is_available() or not getattr(dist, f"is_{backend}_available")():
        raise ValueError(f"backend: this torch was built without {backend!r}; use 'gloo'")
    if backend in ("nccl", "mpi"):
        raise ValueError(
            f"backend: expected 'gloo' or 'ucc', got {backend!r}; NCCL cannot send rollouts from "
            "host memory, and MPI cannot add ranks one by one"
        )
    return backend


def group_of_two(backend: str, store: Any, rank: int, host: str) -> Any:
    """Return the process group of driver and worker; raise RuntimeError if the other is missing.

    Both find each other through the store, which must reject other processes.
    """
    limit = timedelta(seconds=_CONNECT_SECONDS)
    if backend == "ucc":
        return dist.ProcessGroupUCC(store, rank, 2, limit)
    kind: Any = dist.ProcessGroupGloo  # its stub lacks the options
    options = kind._Options()
    options._timeout = limit
    options._devices = [kind.create_device(hostname=host)]
    return kind(store, rank, 2, options)


@dataclass(frozen=True)
class GroupCarrier:
    """Links that are process groups of two."""

    backend: str
    name: ClassVar[str] = "messages"

    def driver_end(self, meeting: Meeting) -> GroupLink:
        group = group_of_two(self.backend, meeting, DRIVER, meeting.address.host)
        return GroupLink(group, WORKER, meeting.key)

    def rank_end(self, meeting: Meeting) -> GroupLink:
        group = group_of_two(self.backend, meeting, WORKER, meeting.address.local_host())
        return GroupLink(group, DRIVER, meeting.key)


class GroupLink:
    """One end of a group of two. A value is sent as one message and one more for each array.

    Every part of a message is signed, by a key that no other link has, and checked before it is
    used: torch does not check which process has connected to a group. `peer` is the rank of the
    other end.
    """

    def __init__(self, group: Any, peer: int, key: bytes) -> None:
        self._group = group
        self._peer = peer
        self._outgoing = Seal(key, DRIVER + WORKER - peer)
        self._incoming = Seal(key, peer)
        self._head = torch.empty(_HEAD_BYTES, dtype=torch.uint8, device="cpu")

    def send(self, value: Any) -> Sent:
        pickled, arrays = packed(value)
        seal = self._outgoing
        seal.advance()
        signatures = [seal.sign(part, array) for part, array in enumerate(arrays, 2)]
        entries = map(_ARRAY.pack, (array.nbytes for array in arrays), signatures)
        data = b"".join([*entries, pickled])
        first, rest = data[:_FIRST_BYTES], bytearray(data[_FIRST_BYTES:])
        signed = _HEAD.pack(len(data), len(arrays), seal.sign(1, rest)) + first
        signed = signed.ljust(_HEAD_BYTES - SIGNATURE_BYTES, b"\0")
        head = bytearray(seal.sign(0, signed) + signed)
        parts: list[Any] = [np.frombuffer(part, np.uint8) for part in (head, rest) if part]
        return partial(_wait_all, [self._post(part) for part in (*parts, *arrays) if part.nbytes])

    def _post(self, array: Buffer) -> tuple[Any, Any]:
        tensor = torch.from_numpy(array)
        with broken_by(RuntimeError):
            return self._group.send([tensor], self._peer, 0), tensor

    def receive(self) -> Any:
        with broken_by(ForgedError):
            return unpacked(*self._receive_parts())

    def _receive_parts(self) -> tuple[memoryview, list[Buffer]]:
        """Receive a pickled value and its arrays; check the signature of each size before use."""
        self._incoming.advance()
        self._fill(self._head)
        head = self._head.numpy()
        signed = head[SIGNATURE_BYTES:]
        self._incoming.check(0, head[:SIGNATURE_BYTES].tobytes(), signed)
        length, count, rest_signature = _HEAD.unpack_from(signed.data)
        data = np.empty(length, np.uint8)
        first = min(length, _FIRST_BYTES)
        data[:first] = signed[_HEAD.size : _HEAD.size + first]
        self._receive_part(1, rest_signature, data[first:])
        arrays = []
        for number in range(count):
            size, array_signature = _ARRAY.unpack_from(data.data, number * _ARRAY.size)
            arrays.append(np.empty(size, np.uint8))
            self._receive_part(2 + number, array_signature, arrays[-1])
        return data[count * _ARRAY.size :].data, arrays

    def _receive_part(self, part: int, given: bytes, array: Buffer) -> None:
        if array.nbytes:
            self._fill(torch.from_numpy(array))
        self._incoming.check(part, given, array)

    def close(self) -> None:
        """Do nothing: the group ends with its last reference, and the other end notices that."""

    def _fill(self, tensor: torch.Tensor) -> None:
        with broken_by(RuntimeError):
            self._group.recv([tensor], self._peer, 0).wait(_FOREVER)


def _wait_all(works: Sequence[tuple[Any, Any]]) -> None:
    """Wait until the other end has these messages; each has a work and its tensor."""
    with broken_by(RuntimeError):
        for work, _ in works:
            work.wait(_FOREVER)
