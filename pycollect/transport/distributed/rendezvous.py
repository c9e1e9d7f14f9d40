"""The driver's port, to which its ranks connect."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import selectors
import socket
import threading
import time
import weakref
from typing import Any

from pycollect import checks as check
from pycollect.transport.distributed.meeting import (
    DRIVER,
    HELLO_BYTES,
    KEY_BYTES,
    NONCE_BYTES,
    Invitation,
    Meeting,
    RankAddress,
    admitted,
)

LOOPBACK = "127.0.0.1"

_MAX_PENDING = 64  # connections that have not yet proved that they know the token
_RETRY_SECONDS = 0.01
_LOGGER = logging.getLogger(__name__)


def outside_address() -> str:
    """Return the address of this machine's interface that reaches other machines."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # an unused address; a UDP socket sends nothing here
            return str(probe.getsockname()[0])
        except OSError:  # the machine has no network
            return LOOPBACK


def check_port(name: str, value: Any) -> int:
    """Return a port number, from an int or its digits; ``None`` and 0 mean any free port."""
    if value is None:
        return 0
    digits = isinstance(value, str) and value.isdecimal()
    port = check.check_integer(name, int(value) if digits else value)
    if not 0 <= port < 1 << 16:
        raise ValueError(f"{name}: expected a number from 0 to 65535, or None, got {port}")
    return port


class Rendezvous:
    """A port of one interface to which ranks connect, each to a :class:`Meeting` of its own.

    `host` is the name or address of the interface, and 0 is any free port. A rank must have
    connected within `timeout` seconds.
    """

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self.host = host
        self._timeout = min(timeout, threading.TIMEOUT_MAX)
        self._token = secrets.token_bytes(KEY_BYTES)
        listener = _listener(host, port)
        self.port = int(listener.getsockname()[1])
        self._acceptor = Acceptor(listener, self._token)
        self._acceptor.start()
        self._close = weakref.finalize(self, self._acceptor.close)

    def invite(self, rank: str, invitation: Invitation) -> Meeting:
        """Expect a rank with that name, which is about to be started; return its meeting."""
        assert self._close.alive, "the rendezvous is closed"
        address = RankAddress(self.host, self.port, self._token, rank, self._timeout)
        meeting = Meeting(address, pickle.dumps(invitation))
        self._acceptor.expected[rank] = meeting
        return meeting

    def close(self) -> None:
        """Stop listening and free the port. Idempotent."""
        self._close()


class Acceptor(threading.Thread):
    """Accepts connections, and passes the connection of an expected rank to its meeting.

    A connection that does not prove that it knows the token is closed. Until then it can hold one
    file descriptor and a few bytes, and the oldest such connection makes way for new ones.
    """

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        super().__init__(name="pycollect-rendezvous", daemon=True)
        self.expected: weakref.WeakValueDictionary[str, Meeting] = weakref.WeakValueDictionary()
        self._listener = listener
        self._token = token
        self._pending: dict[socket.socket, tuple[bytes, bytearray]] = {}
        self._wake, self._woken = socket.socketpair()
        self._driver = os.getpid()
        self._has_warned = False

    def close(self) -> None:
        """Stop listening. In a fork of this process, do nothing."""
        if os.getpid() == self._driver:
            with self._wake:
                self._wake.send(b"\0")  # closing is not enough: a fork may hold the socket open
            self.join()

    def run(self) -> None:
        """Accept connections until `close` is called."""
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector, self._listener, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._woken in ready:
                    break
                for source in ready:
                    if source is self._listener:
                        self._accept(selector)
                    elif source in self._pending:
                        self._read_hello(selector, source)
            for connection in self._pending:
                connection.close()
            self._listener.shutdown(socket.SHUT_RDWR)  # also frees the port if a fork holds it open

    def _accept(self, selector: selectors.BaseSelector) -> None:
        """Accept one connection and send it a nonce."""
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the connection is gone, or no file descriptor is free
            time.sleep(_RETRY_SECONDS)
            return
        if len(self._pending) >= _MAX_PENDING:
            self._refuse(selector, next(iter(self._pending)))
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._pending[connection] = nonce, bytearray()
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # the other end is gone; the next read shows that
            connection.send(nonce)

    def _read_hello(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        """Read more of a connection's hello; admit or refuse the connection once it is complete."""
        _, hello = self._pending[connection]
        try:
            data = connection.recv(HELLO_BYTES - len(hello))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        hello += data
        if not data:
            self._refuse(selector, connection)
        elif len(hello) == HELLO_BYTES:
            self._admit(selector, connection)

    def _admit(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        """Pass a connection to its meeting, or refuse it if its hello is wrong."""
        nonce, hello = self._pending[connection]
        rank, key = admitted(self._token, nonce, bytes(hello)) or (None, b"")
        meeting = self.expected.pop(rank, None) if rank is not None else None
        if meeting is None:
            self._refuse(selector, connection)
            return
        selector.unregister(connection)
        del self._pending[connection]
        meeting.join(connection, key, DRIVER)

    def _refuse(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        selector.unregister(connection)
        del self._pending[connection]
        if not self._has_warned:
            self._has_warned = True
            port = self._listener.getsockname()[1]
            _LOGGER.warning("port %d: refused a connection without this run's secret", port)
        connection.close()


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(4096)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ValueError(
            f"tcp_address, tcp_port: cannot listen at {host!r}, port {port}: {error}"
        ) from error
    return listener
