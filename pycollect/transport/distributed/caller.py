"""The driver's end of a rank that is reached by messages: calls and their results."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pycollect._core import Uninterrupted
from pycollect.errors import without_frames
from pycollect.transport.bells import POLL_SECONDS, AnyBell
from pycollect.transport.distributed.links import Link, LinkBrokenError, Sent
from pycollect.transport.distributed.rank import Call
from pycollect.transport.messages import Close, End, Request
from pycollect.transport.process import LaunchedProcess, ProcessEnd

_REPORT_SECONDS = 2.0  # for a launcher to report that a process is gone
_CLOSED_SECONDS = 0.5  # for a rank that has closed to end the connection itself
_END_SECONDS = 5.0  # for a thread to notice that the other process is gone


class RankLostError(Exception):
    """The connection to a rank is broken, so no result can arrive."""


class RankCaller:
    """Sends requests to the `CalledHost` of a rank. Before the connection, they are queued here.

    Callers do not wait for the network: a thread receives results. A sent message is kept in memory
    until a later or the same call is answered.

    Args:
        transport: Name of the transport that carries the messages.
        connect: Function that waits for the rank and returns the link to it. Runs in the thread.
        process: The rank's process, as its launcher sees it.
        bell: Bell to ring when a call is answered or can no longer be answered.
    """

    def __init__(
        self, transport: str, connect: Callable[[], Link], process: LaunchedProcess, bell: AnyBell
    ) -> None:
        self.transport = transport
        self._connect = connect
        self._process = process
        self._bell = bell
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._lost: str | None = None
        self._call_count = 0
        self._unsent: list[Call] = []
        self._sent: deque[tuple[int, Sent]] = deque()
        self._futures: dict[int, Future[Any]] = {}
        self._closing: Future[Any] | None = None
        self._over, self._killed = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="pycollect-rank-receiver", daemon=True
        )
        self._thread.start()

    def call(self, request: Request) -> Future[Any]:
        """See `Caller`."""
        future = self._ask(False, request)
        if isinstance(request, Close):
            self._closing = future
        return future

    def call_unqueued(self, request: Request) -> Future[Any]:
        """See `Caller`."""
        return self._ask(True, request)

    def _ask(self, unqueued: bool, request: Request) -> Future[Any]:
        future: Future[Any] = Future()
        with Uninterrupted(), self._lock:
            if self._lost is not None:
                future.set_exception(RankLostError(self._lost))
                return future
            self._call_count += 1
            call = Call(self._call_count, unqueued, request)
            if self._link is None:
                self._unsent.append(call)
            else:
                self._post(call)
            self._futures[self._call_count] = future  # not reached if pickling failed
        return future

    def _post(self, call: Call) -> None:
        assert self._link is not None
        try:
            self._sent.append((call.number, self._link.send(call)))
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
            for call in self._unsent:
                self._post(call)
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
        if self._lost is None and self._link is None and self._process.is_over:
            self._lose("it never connected")
        return self._lost is not None

    def process_end(self, error: BaseException) -> ProcessEnd | None:
        """See `Caller`."""
        if not isinstance(error, RankLostError):
            return None
        cause = without_frames(error)
        if not self._has_ended():
            return ProcessEnd(f"the connection to it is broken: {error}", str(error), cause)
        end = self._process.end()
        return ProcessEnd(end.summary, f"{end.details}; {error}", cause)

    def _has_ended(self) -> bool:
        """Return whether the process has ended.

        Waits a little, because the connection may break slightly before the process ends.
        """
        deadline = time.monotonic() + _REPORT_SECONDS
        while not self._process.is_over:
            if time.monotonic() > deadline:
                return False
            self._bell.wait_ring(self._bell.count, POLL_SECONDS)
        return True

    def ask_end(self) -> None:
        """Let a rank that has closed end the connection; ask another one to end its process."""
        if self._closing is not None and self._closing.done():
            self._over.wait(_CLOSED_SECONDS)
        else:
            self._ask(True, End())

    def close(self) -> None:
        """End the connection to a process that was ended. Idempotent."""
        self._lose("it was ended")
        self._killed.set()
        link, self._link = self._link, None
        if link is not None:  # without a link, the thread may wait in vain and is not joined
            link.close()
            self._thread.join(_END_SECONDS)
