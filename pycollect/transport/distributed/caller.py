"""The driver's end of a rank that is reached by messages: calls and their results."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pycollect._core import Uninterrupted
from pycollect.transport.distributed.links import Link, LinkBrokenError, Sent
from pycollect.transport.distributed.rank import CLOSE, END
from pycollect.transport.process import ProcessEnd
from pycollect.transport.processes.handle import ProcessMonitor
from pycollect.transport.waiting import POLL_SECONDS, AnyBell

_REPORT_SECONDS = 2.0  # for a launcher to report that a process is gone
_CLOSED_SECONDS = 0.5  # for a rank that has closed to end the connection itself
_END_SECONDS = 5.0  # for a thread to notice that the other process is gone


class RankLostError(Exception):
    """The connection to a rank is broken, so no result can arrive."""


class RankCaller:
    """Calls methods of the `WorkerHost` in a rank. Calls before the connection are queued here.

    Callers do not wait for the network: a thread receives results. A sent message is kept in memory
    until a later or the same call is answered.

    Args:
        transport: Name of the transport that carries the messages.
        connect: Function that waits for the rank and returns the link to it. Runs in the thread.
        monitor: Monitor of the rank's process.
        bell: Bell to ring when a call is answered or can no longer be answered.
    """

    def __init__(
        self, transport: str, connect: Callable[[], Link], monitor: ProcessMonitor, bell: AnyBell
    ) -> None:
        self.transport = transport
        self._connect = connect
        self._monitor = monitor
        self._bell = bell
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._lost: str | None = None
        self._call_count = 0
        self._unsent: list[tuple[int, tuple[Any, ...]]] = []
        self._sent: deque[tuple[int, Sent]] = deque()
        self._futures: dict[int, Future[Any]] = {}
        self._closing: Future[Any] | None = None
        self._over, self._killed = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="pycollect-rank-receiver", daemon=True
        )
        self._thread.start()

    @property
    def native(self) -> Any:
        """The process as its library represents it."""
        return self._monitor.native

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method after all queued calls."""
        future = self._ask(False, method, arguments)
        if method == CLOSE:
            self._closing = future
        return future

    def call_unqueued(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method at once, also during a rollout; it skips the queue."""
        return self._ask(True, method, arguments)

    def _ask(self, unqueued: bool, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        with Uninterrupted(), self._lock:
            if self._lost is not None:
                future.set_exception(RankLostError(self._lost))
                return future
            self._call_count += 1
            call = (self._call_count, unqueued, method, arguments)
            if self._link is None:
                self._unsent.append((self._call_count, call))
            else:
                self._post(self._call_count, call)
            self._futures[self._call_count] = future  # not reached if pickling failed
        return future

    def _post(self, number: int, call: tuple[Any, ...]) -> None:
        assert self._link is not None
        try:
            self._sent.append((number, self._link.send(call)))
        except LinkBrokenError:  # the receiving thread notices it too
            return

    def _run(self) -> None:
        """Connect, and receive results until the connection is broken."""
        link = None
        try:
            link = self._connect()
            self._begin(link)
            while True:
                self._receive(link)
        except Exception as error:  # torch raises several kinds of RuntimeError
            self._lose(str(error))
        if link is not None:
            # A rank that still runs would log a broken connection.
            self._killed.wait(_REPORT_SECONDS)
            link.close()

    def _begin(self, link: Link) -> None:
        """Send the queued calls."""
        with self._lock:
            if self._lost is not None:
                raise LinkBrokenError(self._lost)
            self._link = link
            for number, call in self._unsent:
                self._post(number, call)
            self._unsent.clear()

    def _receive(self, link: Link) -> None:
        """Receive one result."""
        number, answer = link.receive()
        with self._lock:
            future = self._futures.pop(number, None)
            while self._sent and self._sent[0][0] <= number:
                self._sent.popleft()
        if future is not None:  # the call may have been given up
            future.set_result(answer)
        self._bell.ring()

    def _lose(self, why: str) -> None:
        with self._lock:
            if self._lost is None:
                self._lost = why
            futures = list(self._futures.values())
            self._futures.clear()
            self._unsent.clear()
            self._sent.clear()
        self._over.set()
        for future in futures:
            future.set_exception(RankLostError(why))
        self._bell.ring()

    @property
    def is_gone(self) -> bool:
        """Whether the process is gone or the connection is broken. Does not wait."""
        if self._lost is None and self._link is None and self._monitor.is_over:
            self._lose("it never connected")
        return self._lost is not None

    def process_end(self, error: Exception) -> ProcessEnd | None:
        """Return how the process ended if a call raised RankLostError, else ``None``."""
        if not isinstance(error, RankLostError):
            return None
        if not self._has_ended():
            return ProcessEnd(f"the connection to it is broken: {error}", str(error))
        end = self._monitor.end()
        return ProcessEnd(end.summary, f"{end.details}; {error}")

    def _has_ended(self) -> bool:
        """Return whether the process has ended.

        Waits a little, because the connection may break slightly before the process ends.
        """
        deadline = time.monotonic() + _REPORT_SECONDS
        while not self._monitor.is_over:
            if time.monotonic() > deadline:
                return False
            self._bell.wait_ring(self._bell.count, POLL_SECONDS)
        return True

    def log_of(self, pid: int | None) -> str:
        """Return the last lines that the process logged, or "" if they are unavailable."""
        return self._monitor.recent_log()

    def kill(self) -> None:
        """End the process. Idempotent."""
        if self._closing is not None and self._closing.done():
            self._over.wait(_CLOSED_SECONDS)
        else:
            self.call_unqueued(END)  # its launcher may be unable to kill it directly
        self._monitor.kill()
        self._lose("it was ended")
        self._killed.set()
        link, self._link = self._link, None
        if link is not None:  # without a link, the thread may wait in vain and is not joined
            link.close()
            self._thread.join(_END_SECONDS)
