"""Start workers, and wait for them: the interface of an engine, and a waiter for many handles."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from pycollect._core import available_memory
from pycollect.transport.channel import IDLE_SECONDS, POLL_SECONDS, AnyBell, wait_for
from pycollect.transport.handle import WorkerHandle
from pycollect.transport.messages import WorkerSpec
from pycollect.transport.pickling import Shareable, SharedValue

_RESPOND_SECONDS = 5.0  # for a worker to end its last step and respond to the close request
_CLOSE_SECONDS = 30.0  # for its environments to close, which may have processes of their own


class Engine(ABC):
    """Starts workers of one kind, which ring its `bell` when they may have answered."""

    bell: AnyBell

    def check_resources(self, options: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 (optional)
        """Raise ValueError, naming the resource, if these workers need more than there is."""

    def check_memory(self, needed: int, in_place: bool) -> None:
        """Raise ValueError if rollouts in flight of that many bytes do not fit into memory."""
        limit, source = available_memory()
        if needed > limit:
            raise too_many_bytes(needed, f"only {limit} are available ({source})")

    @abstractmethod
    def put(self, value: Shareable) -> SharedValue:
        """Return a value that several workers share."""

    @abstractmethod
    def start(
        self, spec: WorkerSpec, policy: SharedValue, options: Mapping[str, Any]
    ) -> WorkerHandle:
        """Start a worker with `options` of its kind; it builds its environments at once."""

    @abstractmethod
    def leave(self) -> None:
        """Release everything the engine holds. Idempotent."""


class NotStarted:
    """Handle of a worker whose process could not be started yet; it never answers and never dies.

    The worker group tries again when it next waits for the worker.
    """

    native: ClassVar[Any] = None
    cpu_delay: ClassVar[float] = 0.0
    has_answer: ClassVar[bool] = False
    is_dead: ClassVar[bool] = False
    is_closing: ClassVar[bool] = False

    def recent_log(self) -> str:
        return ""

    def ask_close(self) -> bool:
        return False

    def kill(self) -> None:
        """Do nothing."""


AnyHandle: TypeAlias = WorkerHandle | NotStarted
"""Handle of a worker, whether or not its process was started."""


class AnswerWaiter:
    """Waits for the first of many workers that all ring one bell."""

    def __init__(self, bell: AnyBell) -> None:
        self._bell = bell
        self._polled = 0.0

    def wait_any(self, handles: Sequence[AnyHandle], timeout: float) -> AnyHandle | None:
        """Return the first handle whose oldest call has an answer, or ``None`` after the timeout.

        A dead worker's call counts as answered.
        """
        deadline = time.monotonic() + timeout
        while True:
            seen = self._bell.count
            ready = next((handle for handle in handles if handle.has_answer), None)
            now = time.monotonic()
            pause = POLL_SECONDS
            if now - self._polled >= POLL_SECONDS:  # also while other workers ring
                self._polled, pause = now, IDLE_SECONDS
                ready = next((handle for handle in handles if handle.is_dead), ready)
            if ready is not None or now >= deadline:
                return ready
            self._bell.wait_ring(seen, min(deadline - now, pause))

    def wait_closed(self, handles: Sequence[AnyHandle], timeout: float | None = None) -> None:
        """Let workers close for `timeout` seconds or the usual time, then kill those left."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        asked = [handle for handle in handles if handle.ask_close()]
        self._wait_dead(asked, min(_RESPOND_SECONDS, deadline - time.monotonic()))
        closing = [handle for handle in asked if handle.is_closing]  # the others do not respond
        self._wait_dead(closing, min(_CLOSE_SECONDS, deadline - time.monotonic()))
        for handle in handles:
            handle.kill()

    def _wait_dead(self, handles: Sequence[AnyHandle], timeout: float) -> None:
        """Wait until all workers are dead or the timeout ends."""
        wait_for(self._bell, lambda: all(own.is_dead for own in handles), timeout)


def too_many_bytes(needed: int, available: str) -> ValueError:
    """Return the error for rollouts in flight that need more bytes than are available."""
    return ValueError(
        f"frames_per_batch, prefetch: rollouts in flight need up to {needed} bytes, but "
        f"{available}; reduce frames_per_batch or prefetch"
    )
