"""The driver's end of a rank that is asked by messages: calls and their answers."""

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

_ACCOUNT_SECONDS = 2.0  # in which a launcher tells that a process is gone
_CLOSED_SECONDS = 0.5  # in which a rank that has closed ends the connection by itself
_END_SECONDS = 5.0  # until a thread has seen that the other process is gone


class RankLostError(Exception):
    """No answer can come any more: the connection to a rank is broken."""


class RankCaller:
    """Calls methods of the WorkerHost in a rank. Calls before it is connected wait here.

    Whoever calls does not wait for the network: a thread receives, and what is sent is kept until
    something that was asked later is answered.

    Args:
        transport: what carries the messages.
        connect: waits for the rank and returns the link to it, in that thread.
        monitor: watches the process.
        bell: rung with each answer, and where none can come any more.
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
        self._asked = 0
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
        """The process as its library knows it."""
        return self._monitor.native

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call one of its methods, behind those that are queued."""
        future = self._ask(False, method, arguments)
        if method == CLOSE:
            self._closing = future
        return future

    def call_unqueued(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method that may run beside a rollout: past the queue."""
        return self._ask(True, method, arguments)

    def _ask(self, beside: bool, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        with Uninterrupted(), self._lock:
            if self._lost is not None:
                future.set_exception(RankLostError(self._lost))
                return future
            self._asked += 1
            call = (self._asked, beside, method, arguments)
            if self._link is None:
                self._unsent.append((self._asked, call))
            else:
                self._post(self._asked, call)
            self._futures[self._asked] = future  # unless it did not pickle
        return future

    def _post(self, number: int, call: tuple[Any, ...]) -> None:
        assert self._link is not None
        try:
            self._sent.append((number, self._link.send(call)))
        except LinkBrokenError:  # whoever receives will find the same
            return

    def _run(self) -> None:
        """Connect, and take answers as they come, until the connection is broken."""
        link = None
        try:
            link = self._connect()
            self._begin(link)
            while True:
                self._receive(link)
        except Exception as error:  # of torch: a RuntimeError, of several kinds
            self._lose(str(error))
        if link is not None:
            self._killed.wait(_ACCOUNT_SECONDS)  # before: who is hung up on complains
            link.close()

    def _begin(self, link: Link) -> None:
        """Send what waits."""
        with self._lock:
            if self._lost is not None:
                raise LinkBrokenError(self._lost)
            self._link = link
            for number, call in self._unsent:
                self._post(number, call)
            self._unsent.clear()

    def _receive(self, link: Link) -> None:
        """Take one answer."""
        number, answer = link.receive()
        with self._lock:
            future = self._futures.pop(number, None)
            while self._sent and self._sent[0][0] <= number:
                self._sent.popleft()
        if future is not None:  # else it was given up
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
        """Whether its process is gone, or the connection broken. Does not wait."""
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
        """Whether its process is gone; a connection may be known to be broken a little sooner."""
        deadline = time.monotonic() + _ACCOUNT_SECONDS
        while not self._monitor.is_over:
            if time.monotonic() > deadline:
                return False
            self._bell.wait_ring(self._bell.count, POLL_SECONDS)
        return True

    def log_of(self, pid: int | None) -> str:
        """The last lines that its process logged, as far as they can be had."""
        return self._monitor.recent_log()

    def kill(self) -> None:
        """End its process. Idempotent."""
        if self._closing is not None and self._closing.done():
            self._over.wait(_CLOSED_SECONDS)
        else:
            self.call_unqueued(END)  # where its launcher can only ask others to end it
        self._monitor.kill()
        self._lose("it was ended")
        self._killed.set()
        link, self._link = self._link, None
        if link is not None:  # else, or on a node that answers nothing, its thread may wait in vain
            link.close()
            self._thread.join(_END_SECONDS)
