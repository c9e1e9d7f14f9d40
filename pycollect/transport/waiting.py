"""Wait in the driver for workers: for their answers, and for them to close."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from pycollect._core import available_memory

POLL_SECONDS = 0.02
"""How often a waiting driver checks whether its workers are alive."""

_RESPOND_SECONDS = 5.0  # for a worker to end its last step and respond to the close request
_CLOSE_SECONDS = 30.0  # for its environments to close, which may have processes of their own

H = TypeVar("H", bound="AwaitedWorker")


class AwaitedWorker(Protocol):
    """A worker, as the code that waits for it sees it."""

    @property
    def has_answer(self) -> bool:
        """Whether the oldest call has an answer. Does not wait."""

    @property
    def is_dead(self) -> bool:
        """Whether nothing more can come from the worker. Does not wait."""

    def ask_close(self) -> bool:
        """Ask the worker to close its environments and end; return whether it can still do so."""

    @property
    def is_closing(self) -> bool:
        """Whether the worker has reached the close request. Does not wait."""

    def kill(self) -> None:
        """End the process, and wait for its end if it shares memory with this one. Idempotent."""


class AnyBell(Protocol):
    """Interface of a bell: the core's `Bell`, or a ThreadBell."""

    @property
    def count(self) -> int:
        """Number of rings so far."""

    def ring(self) -> None:
        """Wake all waiting threads."""

    def wait_ring(self, seen: int, seconds: float) -> bool:
        """Sleep until `count` differs from `seen`; return whether it does. May return early."""


class SharedBell(AnyBell, Protocol):
    """A bell that other processes can ring."""

    @property
    def address(self) -> Any:
        """Address by which other processes find the bell."""


class AnswerWaiter:
    """Waits for the first of many workers that all ring one bell."""

    def __init__(self, bell: AnyBell) -> None:
        self._bell = bell
        self._polled = 0.0

    def wait_any(self, handles: Sequence[H], timeout: float) -> H | None:
        """Return the first handle whose oldest call has an answer, or ``None`` after the timeout.

        A dead worker's call counts as answered.
        """
        deadline = time.monotonic() + timeout
        while True:
            seen = self._bell.count
            dead = self._dead_worker(handles)
            if dead is not None:
                return dead
            for handle in handles:
                if handle.has_answer:
                    return handle
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._bell.wait_ring(seen, min(left, POLL_SECONDS))

    def _dead_worker(self, handles: Sequence[H]) -> H | None:
        """Return a dead worker, or ``None``. Polls at intervals, even while other workers ring."""
        now = time.monotonic()
        if now - self._polled < POLL_SECONDS:
            return None
        self._polled = now
        return next((handle for handle in handles if handle.is_dead), None)

    def wait_closed(self, handles: Sequence[AwaitedWorker], timeout: float | None) -> None:
        """Let workers close their environments, then kill the remaining processes.

        Args:
            timeout: Seconds that the workers have. ``None`` means the usual time.
        """
        self._await_closing([handle for handle in handles if handle.ask_close()], timeout)
        for handle in handles:
            handle.kill()

    def _await_closing(self, handles: Sequence[AwaitedWorker], timeout: float | None) -> None:
        """Wait until the workers have closed; give up unresponsive ones."""
        began = time.monotonic()
        self._wait_dead(handles, _shorter(_RESPOND_SECONDS, timeout))
        left = None if timeout is None else timeout - (time.monotonic() - began)
        closing = [handle for handle in handles if handle.is_closing]
        self._wait_dead(closing, _shorter(_CLOSE_SECONDS, left))

    def _wait_dead(self, handles: Sequence[AwaitedWorker], timeout: float) -> None:
        """Wait until all workers are dead or the timeout ends."""
        deadline = time.monotonic() + timeout
        waiting = list(handles)
        while waiting and time.monotonic() < deadline:
            seen = self._bell.count
            waiting = [handle for handle in waiting if not handle.is_dead]
            if waiting:
                self._bell.wait_ring(seen, POLL_SECONDS)


def check_available(needed: int) -> None:
    """Raise ValueError if rollouts in flight of that many bytes do not fit into shared memory."""
    limit, source = available_memory()
    if needed > limit:
        raise too_many_bytes(needed, f"only {limit} are available ({source})")


def too_many_bytes(needed: int, available: str) -> ValueError:
    """Return the error for rollouts in flight that need more bytes than are available."""
    return ValueError(
        f"frames_per_batch, prefetch: rollouts in flight need up to {needed} bytes, but "
        f"{available}; reduce frames_per_batch or prefetch"
    )


class ThreadBell:
    """A bell for threads of this process, used if memory cannot be shared."""

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


def _shorter(usual: float, limit: float | None) -> float:
    return usual if limit is None else min(usual, limit)
