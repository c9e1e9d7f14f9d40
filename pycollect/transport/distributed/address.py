"""Address and secret by which a rank finds its driver, and signatures of messages."""

from __future__ import annotations

import hmac
import socket
import struct
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pycollect.data.slabs import MemoryAddress
from pycollect.transport.messages import Buffer

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Invitation:
    """The driver's message to a rank that has connected.

    Attributes:
        node: Node of the driver; see `this_node`.
        driver: Pid of the driver.
        mailbox: Addresses of a mailbox and the driver's bell; ``None`` if the driver cannot share
            memory.
        carrier: Carrier of messages if the rank cannot share memory.
    """

    node: str
    driver: int
    mailbox: tuple[MemoryAddress, MemoryAddress] | None
    carrier: Any


@dataclass(frozen=True)
class RankAddress:
    """Address at which a rank meets its driver. Pickles, and is all that a rank gets at its start.

    Attributes:
        host: Host of the driver's rendezvous.
        port: Port of the driver's rendezvous.
        token: Secret of the collector and its ranks, which signs each connection.
        rank: Name of the rank, unique within the rendezvous even after a rank has died.
        timeout: Seconds within which both must have met.
    """

    host: str
    port: int
    token: bytes = field(repr=False)  # a traceback or a log must not show it
    rank: str
    timeout: float

    def local_host(self) -> str:
        """Return the address of this machine's interface that reaches the driver."""
        place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(place[0], socket.SOCK_DGRAM) as probe:
            probe.connect(place[4])  # a UDP socket sends nothing here
            return str(probe.getsockname()[0])


def this_node() -> str:
    """Return an id that only processes of the same machine and host name share."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


SIGNATURE_BYTES = 32
KEY_BYTES = 32

Signed = bytes | bytearray | memoryview | Buffer

_PLACE = struct.Struct("<QQ")  # number of the message, number of its part


class ForgedError(Exception):
    """A message does not carry the signature of its expected sender."""


def signature(key: bytes, *parts: Signed) -> bytes:
    """Return the signature of the concatenated parts: keyed BLAKE2b.

    BLAKE2b is a keyed hash of the standard library. On CPUs without SHA instructions it takes half
    the time of HMAC-SHA256, which matters for rollouts of megabytes.
    """
    state = blake2b(key=key, digest_size=SIGNATURE_BYTES)
    for part in parts:
        state.update(part)  # type: ignore[arg-type] # an array is a buffer
    return state.digest()


def is_signed(given: bytes, key: bytes, *parts: Signed) -> bool:
    """Return whether a signature of these parts is right, in constant time."""
    return hmac.compare_digest(given, signature(key, *parts))


class Seal:
    """Signs or checks the messages that one end of a link sends.

    A signature covers the sending end, the number of the message and the number of the part, so
    that a message cannot be replayed, omitted, reordered or sent back.

    Args:
        key: Key of the link, which no other link has.
        end: The sending end, DRIVER or WORKER.
    """

    def __init__(self, key: bytes, end: int) -> None:
        self._key = signature(key, b"messages of end %d" % end)
        self._number = 0

    def advance(self) -> None:
        """Begin the next message."""
        self._number += 1

    def sign(self, part: int, data: Signed) -> bytes:
        """Return the signature of a part of the current message."""
        return signature(self._key, self._place(part), data)

    def check(self, part: int, given: bytes, data: Signed) -> None:
        """Raise ForgedError unless these bytes are that part of the current message."""
        if not is_signed(given, self._key, self._place(part), data):
            raise ForgedError("a message is not signed by a process of this collector")

    def _place(self, part: int) -> bytes:
        return _PLACE.pack(self._number, part)
