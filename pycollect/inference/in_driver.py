"""A bell that calls the policy for workers while the driver waits for a rollout."""

from __future__ import annotations

import threading
import time

from pycollect._core import Bell, Uninterrupted
from pycollect.data.slabs import MemoryAddress
from pycollect.inference.server import InferenceServer


class ServingBell:
    """A Bell that serves inference requests in the thread that waits for it.

    The policy is therefore called in the thread that waits for a batch, which is otherwise idle.

    Args:
        bell: Bell on which the thread sleeps.
        server: Calls the policy.
    """

    def __init__(self, bell: Bell, server: InferenceServer) -> None:
        self._bell, self._server = bell, server
        self._serving = threading.Lock()

    @property
    def address(self) -> MemoryAddress:
        """Address by which workers find the bell."""
        return self._bell.address

    @property
    def count(self) -> int:
        """Number of times that the bell was rung."""
        return self._bell.count

    def ring(self) -> None:
        """Wake the waiting threads."""
        self._bell.ring()

    def wait_ring(self, seen: int, seconds: float) -> bool:
        """Sleep until a worker has answered or the time is over; return whether `count` changed.

        Meanwhile, this thread serves inference requests, unless another thread does so when the
        wait begins. Waits are short, so a thread that does not serve takes over with one of its
        next waits.
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
        """Alternate between serving and sleeping; a client that knocked does not knock again."""
        server, deadline = self._server, time.monotonic() + seconds
        pending = server.pending  # does not change, because an answer rings and ends the wait
        while True:
            knocks = self._bell.knocks
            awaited = server.serve(pending)
            left = deadline - time.monotonic()
            if self._bell.count != seen or left <= 0:
                return
            max_wait = server.max_wait
            seconds_left = left if max_wait is None else min(left, max_wait)
            self._bell.wait_knock(knocks, seconds_left, awaited)
