"""Bells, by which workers wake a waiting driver."""

from __future__ import annotations

import threading
from typing import ClassVar, Protocol

from pycollect.data.slabs import MemoryAddress

POLL_SECONDS = 0.02
"""How often a waiting driver checks whether its workers are alive."""


class AnyBell(Protocol):
    """Interface of a bell: the core's `Bell`, one that works while it waits, or a ThreadBell."""

    @property
    def address(self) -> MemoryAddress | None:
        """Address by which other processes find the bell; ``None`` if they cannot ring it."""

    @property
    def count(self) -> int:
        """Number of rings so far."""

    def ring(self) -> None:
        """Wake all waiting threads."""

    def wait_ring(self, seen: int, seconds: float) -> bool:
        """Sleep until `count` differs from `seen`; return whether it does. May return early."""


class ThreadBell:
    """A bell for threads of this process, used if memory cannot be shared."""

    address: ClassVar[None] = None

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        """Number of rings so far."""
        return self._count

    def ring(self) -> None:
        """Wake all waiting threads."""
        with self._condition:
            self._count += 1
            self._condition.notify_all()

    def wait_ring(self, seen: int, seconds: float) -> bool:
        """Sleep until `count` differs from `seen` or the time ends; return whether it differs."""
        with self._condition:
            return self._condition.wait_for(lambda: self._count != seen, seconds)
