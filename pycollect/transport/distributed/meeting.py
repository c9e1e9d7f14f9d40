"""How driver and rank meet: address, secret and signatures, connection and invitation."""

from __future__ import annotations

import contextlib
import hmac
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from pycollect.data.slabs import MemoryAddress
from pycollect.errors import without_frames
from pycollect.transport.messages import Buffer

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Invitation:
    """The driver's message to a rank that has connected."""

    node: str  # node of the driver; see `this_node`
    driver: int  # pid of the driver
    mailbox: tuple[MemoryAddress, MemoryAddress] | None  # mailbox and bell, if memory can be shared
    carrier: Any  # carrier of messages if the rank cannot share memory


@dataclass(frozen=True)
class RankAddress:
    """Address at which a rank meets its driver. Pickles, and is all that a rank gets at its start.

    The token is a secret of the collector and its ranks, which signs each connection.
    """

    host: str
    port: int
    token: bytes = field(repr=False)  # a traceback or a log must not show it
    rank: str  # name of the rank, unique within the rendezvous even after a rank has died
    timeout: float  # seconds within which both must have met

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
    """Signs or checks the messages that one end, DRIVER or WORKER, of a link sends.

    A signature covers the sending end, the number of the message and the number of the part, so
    that a message cannot be replayed, omitted, reordered or sent back. No other link has the key.
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


DRIVER, WORKER = 0, 1
"""Ranks of the two ends in each group."""

NONCE_BYTES = 32
HELLO_BYTES = NONCE_BYTES + 32 + SIGNATURE_BYTES
"""Size of a rank's first message: a nonce, its padded name and a signature."""

REFUSAL = "refusal"
"""Key of the reason why a rank cannot share memory."""

_INVITATION = "invitation"
_HEAD = struct.Struct(f"<Q{SIGNATURE_BYTES}s")  # size and signature of a value
_MAX_BYTES = 1 << 24  # of a value
_CHUNK_BYTES = 1 << 16
_RETRY_SECONDS = 0.1


class Meeting(Store):
    """One end of a connection between the driver and a rank.

    It is a store of torch.distributed, through which a process group finds its other end: a value
    that one end sets is sent to the other. Only one thread at a time may use an end. The driver
    sends its pickled invitation to the rank when it connects.
    """

    def __init__(self, address: RankAddress, invitation: bytes = b"") -> None:
        super().__init__()
        self.address = address
        self._invitation = invitation
        self.key = b""
        """Key of this connection, once both ends are connected."""
        self._joined = threading.Event()
        self._receiving = threading.Lock()
        self._connection: socket.socket | None = None
        self._failure: Exception | None = None
        self._received = bytearray()
        self._values: dict[str, bytes] = {}

    def join(self, connection: socket.socket, key: bytes, end: int) -> None:
        """Use this connection; its other end has proved that it knows the token.

        The driver sends the invitation before a thread that waits in `set` continues, because two
        threads that sign messages at once would corrupt each other's signatures.
        """
        self.key = key
        self._outgoing, self._incoming = Seal(key, end), Seal(key, DRIVER + WORKER - end)
        self._connection = connection
        if end == DRIVER:
            with contextlib.suppress(OSError):  # the rank is gone already
                self._send(_INVITATION, self._invitation)
        if self._failure is not None:  # the meeting was closed meanwhile
            connection.close()
        self._joined.set()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override] # torch gives bytes
        """Set a value for both ends."""
        self._values[key] = value
        if not self._joined.wait(self.address.timeout):
            raise TimeoutError(f"rank {self.address.rank!r} did not connect in time")
        if self._failure is not None:
            raise without_frames(self._failure)
        self._send(key, value)

    def _send(self, key: str, value: bytes) -> None:
        assert self._connection is not None
        data = key.encode() + b"\0" + value
        self._outgoing.advance()
        self._connection.settimeout(self.address.timeout)
        self._connection.sendall(_HEAD.pack(len(data), self._outgoing.sign(0, data)) + data)

    def get(self, key: str) -> bytes:
        """Wait for a value that either end sets, and return it.

        Raises TimeoutError if it was not set in time, ConnectionError if the other end is gone, and
        ForgedError if a message is not signed by the other end.
        """
        return self._await_value(key, self.address.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until these values are set."""
        seconds = self.address.timeout if timeout is None else timeout.total_seconds()
        for key in keys:
            self._await_value(key, seconds)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether these values are set. Does not wait."""
        if self._joined.is_set() and self._failure is None:
            self._receive(0.0)
        return all(key in self._values for key in keys)

    def publish(self, key: str, value: Any) -> None:
        """Pickle a value and set it for both ends."""
        self.set(key, pickle.dumps(value))

    def read(self, key: str) -> Any:
        """Wait for a value that the other end published and return it. Raises like `get`."""
        return pickle.loads(self.get(key))  # safe: the signature was checked

    def await_end(self) -> None:
        """Wait until the other end is gone."""
        while self._failure is None:
            self._receive(None)

    def close(self) -> None:
        """Close this end, and wake a thread that waits for it. Idempotent."""
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the other end has closed it
                self._connection.shutdown(socket.SHUT_RDWR)
        with self._receiving:
            self._fail(ConnectionError("the connection was closed"))
        self._joined.set()

    def _await_value(self, key: str, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        while key not in self._values:
            if self._failure is not None:
                raise without_frames(self._failure)
            left = deadline - time.monotonic()
            if left <= 0 or not self._joined.wait(left):
                text = f"rank {self.address.rank!r} and its driver did not connect in time"
                raise TimeoutError(text)
            if self._failure is None:
                self._receive(max(left, 0.0))
        return self._values[key]

    def _receive(self, seconds: float | None) -> None:
        """Receive the next bytes; wait for them for that time at most."""
        assert self._connection is not None
        with self._receiving:
            try:
                self._connection.settimeout(seconds)
                data = self._connection.recv(_CHUNK_BYTES)
                if not data:
                    raise ConnectionError("the other end has closed the connection")
                self._received += data
                self._take_values()
            except (BlockingIOError, TimeoutError):
                return
            except (OSError, ForgedError) as error:
                self._fail(error)

    def _take_values(self) -> None:
        while len(self._received) >= _HEAD.size:
            size, signed = _HEAD.unpack_from(self._received)
            if size > _MAX_BYTES:
                raise ForgedError(f"a message of {size} bytes exceeds the limit of {_MAX_BYTES}")
            end = _HEAD.size + size
            if len(self._received) < end:
                return
            data = bytes(self._received[_HEAD.size : end])
            self._incoming.advance()
            self._incoming.check(0, signed, data)
            key, _, value = data.partition(b"\0")
            self._values[key.decode()] = value
            del self._received[:end]

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = without_frames(error)
        if self._connection is not None:
            self._connection.close()


def meet(address: RankAddress) -> tuple[Meeting, Invitation]:
    """Connect this rank to its driver; return its end of the meeting and the invitation."""
    deadline = time.monotonic() + address.timeout
    while True:
        meeting = Meeting(address)
        try:
            _connect(meeting, deadline - time.monotonic())
            return meeting, meeting.read(_INVITATION)
        except (OSError, ForgedError) as error:
            meeting.close()
            if time.monotonic() > deadline:
                text = f"no driver accepted {address}: {error}"
                raise TimeoutError(text) from error
            time.sleep(_RETRY_SECONDS)


def _connect(meeting: Meeting, seconds: float) -> None:
    """Prove to the driver that this process knows the token."""
    address = meeting.address
    connection = socket.create_connection(
        (address.host, address.port), max(seconds, _RETRY_SECONDS)
    )
    try:
        nonce = bytearray()
        while len(nonce) < NONCE_BYTES:
            data = connection.recv(NONCE_BYTES - len(nonce))
            if not data:
                raise ConnectionError("the driver has closed the connection")
            nonce += data
        named = secrets.token_bytes(NONCE_BYTES) + address.rank.encode().ljust(32, b"\0")
        connection.sendall(named + signature(address.token, b"hello", nonce, named))
    except BaseException:
        connection.close()
        raise
    meeting.join(connection, signature(address.token, b"link", nonce, named), WORKER)


def admitted(token: bytes, nonce: bytes, hello: bytes) -> tuple[str, bytes] | None:
    """Return the rank that sent this hello and the connection's key; ``None`` for a stranger."""
    named, given = hello[:-SIGNATURE_BYTES], hello[-SIGNATURE_BYTES:]
    if not is_signed(given, token, b"hello", nonce, named):
        return None
    name = named[NONCE_BYTES:].rstrip(b"\0").decode()
    return name, signature(token, b"link", nonce, named)
