"""A driver waits for workers: their answers, their closing."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from pycollect._core import available_memory

LOOK_SECONDS = 0.02
"""How often a driver that waits looks whether its workers live."""

_HEAR_SECONDS = 5.0  # until a worker that is asked to close has ended its last step, and says so
_CLOSE_SECONDS = 30.0  # and its environments are closed, which may have processes of their own

H = TypeVar("H", bound="Waited")


class Waited(Protocol):
    """A worker, as whoever waits for it sees it."""

    @property
    def has_answer(self) -> bool:
        """Whether the oldest call has an answer. Does not wait."""

    @property
    def is_dead(self) -> bool:
        """Whether nothing more can come from it. Does not wait."""

    def ask_close(self) -> bool:
        """Ask it to close its environments and to end; return whether it can still do so."""

    @property
    def is_closing(self) -> bool:
        """Whether it has heard that it is to close, behind all else. Does not wait."""

    def kill(self) -> None:
        """End its process. Where it shares memory with this one, it is gone then. Idempotent."""


class Rung(Protocol):
    """A Bell, or what stands for one."""

    @property
    def count(self) -> int:
        """How often it was rung."""

    def ring(self) -> None:
        """Wake whoever waits."""

    def wait_ring(self, seen: int, seconds: float) -> bool:
        """Sleep until `count` is no longer `seen`; return whether it is not. May end early."""


class SharedBell(Rung, Protocol):
    """A Rung that other processes can ring."""

    @property
    def address(self) -> Any:
        """By which they find it."""


class AnswerWaiter:
    """Waits for the first of many workers, all of which ring one bell."""

    def __init__(self, bell: Rung) -> None:
        self._bell = bell
        self._looked = 0.0

    def wait_any(self, handles: Sequence[H], timeout: float) -> H | None:
        """One whose oldest call has an answer, the first such in the order given; None: none has.

        A dead worker's call counts as answered.
        """
        deadline = time.monotonic() + timeout
        while True:
            seen = self._bell.count
            dead = self._one_that_died(handles)
            if dead is not None:
                return dead
            for handle in handles:
                if handle.has_answer:
                    return handle
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._bell.wait_ring(seen, min(left, LOOK_SECONDS))

    def _one_that_died(self, handles: Sequence[H]) -> H | None:
        """Looks every now and then, also while others ring all the time."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return None
        self._looked = now
        return next((handle for handle in handles if handle.is_dead), None)

    def wait_closed(self, handles: Sequence[Waited], timeout: float | None) -> None:
        """Let workers close their environments, then end those that are still there.

        Args:
            timeout: seconds that they have for it; None: the usual ones.
        """
        self._await_closing([handle for handle in handles if handle.ask_close()], timeout)
        for handle in handles:
            handle.kill()

    def _await_closing(self, handles: Sequence[Waited], timeout: float | None) -> None:
        """Until those that were asked to close are gone; those that do not hear it are given up."""
        began = time.monotonic()
        self._wait_dead(handles, _least(_HEAR_SECONDS, timeout))
        left = None if timeout is None else timeout - (time.monotonic() - began)
        closing = [handle for handle in handles if handle.is_closing]
        self._wait_dead(closing, _least(_CLOSE_SECONDS, left))

    def _wait_dead(self, handles: Sequence[Waited], timeout: float) -> None:
        """Until nothing more can come from any of them, or that time is over."""
        deadline = time.monotonic() + timeout
        waiting = list(handles)
        while waiting and time.monotonic() < deadline:
            seen = self._bell.count
            waiting = [handle for handle in waiting if not handle.is_dead]
            if waiting:
                self._bell.wait_ring(seen, LOOK_SECONDS)


def check_available(needed: int) -> None:
    """Raise ValueError if that many bytes of rollouts in flight cannot be shared."""
    limit, source = available_memory()
    if needed > limit:
        raise too_many_bytes(needed, f"only {limit} are available ({source})")


def too_many_bytes(needed: int, there: str) -> ValueError:
    """Return the error for rollouts in flight that need more bytes than are available."""
    return ValueError(
        f"frames_per_batch, prefetch: rollouts in flight need up to {needed} bytes, but {there}; "
        "reduce frames_per_batch or prefetch"
    )


class ThreadBell:
    """What a Bell is, where memory cannot be shared: only threads of this process ring it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        """How often it was rung."""
        return self._count

    def ring(self) -> None:
        """Wake whoever waits."""
        with self._condition:
            self._count += 1
            self._condition.notify_all()

    def wait_ring(self, seen: int, seconds: float) -> bool:
        """Sleep until `count` is no longer `seen`; return whether it is not."""
        with self._condition:
            return self._condition.wait_for(lambda: self._count != seen, seconds)


def _least(usual: float, given: float | None) -> float:
    return usual if given is None else min(usual, given)
