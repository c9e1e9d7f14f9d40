"""The address at which a rank connects to its driver, and the invitation that it gets there."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
