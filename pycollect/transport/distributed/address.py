"""Address and secret by which a rank finds its driver."""

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
    """What a rank is asked to do.

    Attributes:
        node: the driver's, see `this_node`.
        driver: the driver's process id.
        mailbox: addresses of a mailbox and of the bell that is rung for it; None: the driver shares
            memory with nobody.
        carrier: of messages between the two.
    """

    node: str
    driver: int
    mailbox: tuple[MemoryAddress, MemoryAddress] | None
    carrier: Any


@dataclass(frozen=True)
class RankAddress:
    """Where one rank meets its driver. It is all that a rank is started with, and pickles.

    Attributes:
        host, port: of the driver's rendezvous.
        token: known to the collector and its ranks alone; each connection is signed with it.
        rank: no other one of the rendezvous, dead ones included, has this name.
        timeout: seconds in which they must have met.
    """

    host: str
    port: int
    token: bytes = field(repr=False)  # a traceback or a log must not show it
    rank: str
    timeout: float

    def own_host(self) -> str:
        """The number of the interface of this machine through which the driver is reached."""
        place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(place[0], socket.SOCK_DGRAM) as probe:
            probe.connect(place[4])  # sends nothing
            return str(probe.getsockname()[0])


def this_node() -> str:
    """What processes have in common that may share memory: the machine, and its name."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


SIGNATURE_BYTES = 32
KEY_BYTES = 32

Signed = bytes | bytearray | memoryview | Buffer

_PLACE = struct.Struct("<QQ")  # number of the message, number of its part


class ForgedError(Exception):
    """Bytes that arrived do not carry the signature of the process that should have sent them."""


def signature(key: bytes, *parts: Signed) -> bytes:
    """Return the signature of the concatenated parts: keyed BLAKE2b.

    BLAKE2b is a keyed hash of the standard library. On CPUs without SHA instructions it takes
    half the time of HMAC-SHA256, which matters for rollouts of megabytes.
    """
    state = blake2b(key=key, digest_size=SIGNATURE_BYTES)
    for part in parts:
        state.update(part)  # type: ignore[arg-type] # an array is a buffer
    return state.digest()


def is_signed(given: bytes, key: bytes, *parts: Signed) -> bool:
    """Return whether a signature of these parts is right, in constant time."""
    return hmac.compare_digest(given, signature(key, *parts))


class Seal:
    """Signs, or checks, the messages that one end of a link sends.

    A signature covers the sending end, the number of the message and the number of the part, so
    that a message cannot be replayed, left out, reordered or sent back.

    Args:
        key: of the link, which no other link has.
        end: the sending one, DRIVER or WORKER.
    """

    def __init__(self, key: bytes, end: int) -> None:
        self._key = signature(key, b"messages of end %d" % end)
        self._number = 0

    def advance(self) -> None:
        """Begin the next message."""
        self._number += 1

    def sign(self, part: int, data: Signed) -> bytes:
        """Return the signature of that part of the message."""
        return signature(self._key, self._place(part), data)

    def check(self, part: int, given: bytes, data: Signed) -> None:
        """Raise ForgedError unless these bytes are that part of the message."""
        if not is_signed(given, self._key, self._place(part), data):
            raise ForgedError("a message is not signed by a process of this collector")

    def _place(self, part: int) -> bytes:
        return _PLACE.pack(self._number, part)
