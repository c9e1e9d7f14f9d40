"""A bell on which a driver sleeps, and calls the policy for workers meanwhile."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

from pycollect._core import Bell, Uninterrupted
from pycollect.data.slabs import MemoryAddress
from pycollect.inference.server import InferenceServer


class Asker(Protocol):
    """Asks the workers that ring a bell for rollouts."""

    @property
    def pending(self) -> int:
        """How many were asked for something and have not answered yet."""


class ServingBell:
    """Offers what a Bell does, see there: whoever waits for it serves.

    So the policy is called in the thread that awaits a batch, which has nothing else to do.

    Args:
        bell: on which it sleeps.
        server: calls the policy.
    """

    def __init__(self, bell: Bell, server: InferenceServer) -> None:
        self._bell, self._server = bell, server
        self._serving = threading.Lock()
        self._asker: weakref.ref[Asker] | None = None

    def watch(self, asker: Asker) -> None:
        """Be told by whoever asks the workers who may come. It holds this bell, not the bell it."""
        self._asker = weakref.ref(asker)

    @property
    def _owing(self) -> int:
        asker = None if self._asker is None else self._asker()
        return 0 if asker is None else asker.pending

    @property
    def address(self) -> MemoryAddress:
        """By which workers find it."""
        return self._bell.address

    @property
    def count(self) -> int:
        """How often it was rung."""
        return self._bell.count

    def ring(self) -> None:
        """Wake whoever waits."""
        self._bell.ring()

    def wait_ring(self, seen: int, seconds: float) -> bool:
        """Sleep until a worker has answered, or that time is over; return whether `count` changed.

        Questions to the policy are answered meanwhile, in this thread, unless another one does so
        when the wait begins: who waits beside it takes its place when it comes again, so it waits
        for a moment at a time.
        """
        serves = False
        try:
            with Uninterrupted():
                serves = self._serving.acquire(blocking=False)
            if not serves:
                return self._bell.wait_ring(seen, seconds)
            self._server.refresh()
            self._serve(seen, seconds)
        finally:
            if serves:
                self._serving.release()
        return self._bell.count != seen

    def _serve(self, seen: int, seconds: float) -> None:
        """Look, then sleep: who knocked before does not knock again."""
        server, deadline = self._server, time.monotonic() + seconds
        owing = self._owing  # who answers rings, which ends this
        while True:
            heard = self._bell.knocks
            awaited = server.serve(owing)
            left = deadline - time.monotonic()
            if self._bell.count != seen or left <= 0:
                return
            patience = server.patience
            most = left if patience is None else min(left, patience)
            self._bell.wait_knock(heard, most, awaited)
