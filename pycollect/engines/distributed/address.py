"""Where the driver and a rank meet, and what they tell each other there."""

from __future__ import annotations

import hashlib
import hmac
import pickle
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from pycollect.batch.slab_rows import MemoryAddress

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
        host, port: of the driver's store.
        token: known to the collector and its ranks alone; what stands in the store is signed by it.
        rank: no other one of the store, dead ones included, has this name.
        timeout: seconds in which they must have met.
    """

    host: str
    port: int
    token: bytes
    rank: str
    timeout: float

    def store(self) -> PrefixStore:
        """A connection of its own to what both see; a thread that waits there holds up no other."""
        store = TCPStore(
            self.host,
            self.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=self.timeout),
        )
        return PrefixStore(self.rank, store)

    def own_host(self) -> str:
        """The number of the interface of this machine through which the driver is reached."""
        place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(place[0], socket.SOCK_DGRAM) as probe:
            probe.connect(place[4])  # sends nothing
            return str(probe.getsockname()[0])

    def tell(self, store: PrefixStore, key: str, value: Any) -> None:
        """Put a value there, signed."""
        data = pickle.dumps(value)
        store.set(key, self._signature(key, data) + data)  # type: ignore[arg-type] # takes both

    def told(self, store: PrefixStore, key: str) -> Any:
        """The value that the other one put there. Waits.

        Raises:
            ValueError: it comes from somebody else.
        """
        signed = store.get(key)
        signature, data = signed[:32], signed[32:]
        if not hmac.compare_digest(signature, self._signature(key, data)):
            raise ValueError(f"{key}: not signed by a process of this collector")
        return pickle.loads(data)

    def _signature(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self.token, f"{self.rank} {key} ".encode() + data, hashlib.sha256)


def this_node() -> str:
    """What processes have in common that may share memory: the machine, and its name."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"
