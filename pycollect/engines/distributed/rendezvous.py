"""The driver's end of the meeting with its ranks."""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from pycollect import checks as check
from pycollect.engines.distributed.address import Invitation, RankAddress

LOOPBACK = "127.0.0.1"


def outside_address() -> str:
    """The number of the interface of this machine that reaches others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing: a number that nobody has
            return str(probe.getsockname()[0])
        except OSError:  # there is no way out
            return LOOPBACK


def check_port(name: str, value: Any) -> int:
    """A port to listen at, a number or its digits; 0, also for None: any that is free."""
    if value is None:
        return 0
    digits = isinstance(value, str) and value.isdecimal()
    port = check.check_integer(name, int(value) if digits else value)
    if not 0 <= port < 1 << 16:
        raise ValueError(f"{name}: expected a number from 0 to 65535, or None, got {port}")
    return port


class Rendezvous:
    """A store of this process, at one address of this machine, where ranks are told what to do.

    Args:
        host: the name or number of the interface that it listens at; no other one is open.
        port: 0: any that is free.
        timeout: seconds in which a rank must have come.

    Raises:
        ValueError: it cannot listen there.
    """

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self.host = host
        listener = _listener(host, port)
        self.port = int(listener.getsockname()[1])
        self._token = secrets.token_bytes(32)
        self._timeout = timeout
        self._store: TCPStore | None = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),  # the store closes it
        )

    def invite(self, rank: str, invitation: Invitation) -> Meeting:
        """Leave a note for a rank of that name, which is about to be started."""
        assert self._store is not None, "the rendezvous is closed"
        address = RankAddress(self.host, self.port, self._token, rank, self._timeout)
        store = PrefixStore(rank, self._store)
        address.tell(store, "invitation", invitation)
        return Meeting(address, store)

    def close(self) -> None:
        """Listen no more; once meetings are over the port is free. Idempotent."""
        self._store = None


class Meeting:
    """What the driver hears of a rank before they are connected."""

    def __init__(self, address: RankAddress, store: PrefixStore) -> None:
        self.address = address
        self._store = store

    @property
    def refusal(self) -> str | None:
        """Why it cannot share memory; None: it has not said so yet. Does not wait."""
        if not self._store.check(["refusal"]):
            return None
        return str(self.address.told(self._store, "refusal"))


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
