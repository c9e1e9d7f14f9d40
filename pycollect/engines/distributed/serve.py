"""A RemoteWorker that is asked by messages."""

from __future__ import annotations

import os
import queue
import signal
import threading
from typing import Any, NamedTuple

from pycollect._core import kill_descendants
from pycollect.engines.distributed.link import Link, LinkBrokenError, Sent
from pycollect.engines.messages import ErrorReport
from pycollect.engines.remote_worker import RemoteWorker, answer_by

CLOSE = "close"
"""The last method that is called."""

END = "end"
"""What is called beside all else to have a rank's process killed."""


class Call(NamedTuple):
    """One call on its way to a rank.

    Attributes:
        number: comes back with its answer.
        beside: it may run beside a rollout, and does not wait for it.
    """

    number: int
    beside: bool
    method: str
    arguments: tuple[Any, ...]


def answer_calls(link: Link) -> None:
    """Answer what is asked of a worker, from `build` until CLOSE.

    When the driver is gone, this process and all that its environments started are killed.
    """
    worker = RemoteWorker()
    answers = _Answers(link)
    calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
    closed = threading.Event()
    arguments = (link, worker, answers, calls, closed)
    threading.Thread(target=_receive, args=arguments, daemon=True).start()
    method = ""
    while method != CLOSE:
        number, _, method, given = calls.get()
        answer = answer_by(worker, method, given)
        if method == CLOSE:
            closed.set()
        answers.give(number, answer)
    answers.wait()


def _receive(
    link: Link,
    worker: RemoteWorker,
    answers: _Answers,
    calls: queue.SimpleQueue[Call],
    closed: threading.Event,
) -> None:
    """Take calls as they come; do those beside the queue at once."""
    while True:
        try:
            call = Call(*link.receive())
        except LinkBrokenError:  # the driver is gone
            if closed.is_set():
                return
            _end()
        if call.method == END:
            _end()
        if call.beside:
            answers.give(call.number, answer_by(worker, call.method, call.arguments))
        else:
            calls.put(call)


def _end() -> None:
    """Kill this process, its group and its descendants."""
    kill_descendants()
    os.killpg(0, signal.SIGKILL)


class _Answers:
    """Answers on their way. A rollout is collected while the one before it is sent."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._last: Sent | None = None

    def give(self, number: int, answer: Any) -> None:
        """Send one, once the other one has that before it."""
        with self._lock:
            self._wait()
            try:
                self._last = self._link.send((number, answer))
            except LinkBrokenError:
                raise
            except Exception as error:  # it does not pickle
                self._last = self._link.send((number, ErrorReport.of(error)))

    def wait(self) -> None:
        """Until the other one has all of them."""
        with self._lock:
            self._wait()

    def _wait(self) -> None:
        if self._last is not None:
            self._last.wait()
            self._last = None
