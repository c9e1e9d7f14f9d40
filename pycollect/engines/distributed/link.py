"""What carries Python values between the driver and a rank, and how they are packed for it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Protocol

import cloudpickle
import numpy as np

from pycollect.engines.distributed.meeting import Meeting
from pycollect.engines.messages import Buffer


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
