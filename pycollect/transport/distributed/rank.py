"""The process of a rank: its start, its interrupts, and the calls that it serves."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from pycollect._core import SharedMemoryError, WorkerMailbox, adopt_orphans, kill_descendants
from pycollect.transport.descendants import begin_worker, end_worker
from pycollect.transport.distributed.address import Invitation, RankAddress, this_node
from pycollect.transport.distributed.links import Link, LinkBrokenError, Sent
from pycollect.transport.distributed.meeting import REFUSAL, meet
from pycollect.transport.host import WorkerHost, answer_by
from pycollect.transport.messages import ErrorReport
from pycollect.transport.processes.child import log_to
from pycollect.transport.processes.serve import answer_all

_OWN = [signal.SIGINT]


@contextmanager
def block_sigint_in_children() -> Iterator[None]:
    """Processes that are started here, in this thread, have it blocked, and so have theirs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OWN)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_sigint() -> None:
    """In such a process's main thread: it is heard from now on; what came before is forgotten."""
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OWN)
    signal.signal(signal.SIGINT, usual)


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
    worker = WorkerHost()
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
    worker: WorkerHost,
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


def run_child(address: RankAddress, log: int) -> None:
    """The main function of a rank that the driver started itself.

    Args:
        log: the descriptor of what is to be its standard error.
    """
    log_to(log)
    run_rank(address)
    end_worker()


def run_rank(address: RankAddress) -> None:
    """Do what the driver asks, until it asks to close, or is gone: then this process is killed.

    The process leads a group of its own from now on, with all that its environments start.
    """
    adopt_orphans()
    with contextlib.suppress(OSError):  # it leads one, or a session
        os.setpgid(0, 0)
    unblock_sigint()
    meeting, invitation = meet(address)
    served = _mailbox(invitation)
    if isinstance(served, WorkerMailbox):
        meeting.close()
        answer_all(served)
        return
    meeting.publish(REFUSAL, served)
    with closing(invitation.carrier.rank_end(meeting)) as link:
        answer_calls(link)


def _mailbox(invitation: Invitation) -> WorkerMailbox | str:
    """Its end of the driver's mailbox, or why it has none."""
    if invitation.mailbox is None:
        return "the driver shares memory with no other process"
    if this_node() != invitation.node:
        return "it is on another node"
    try:
        end = WorkerMailbox(*invitation.mailbox)
        begin_worker(invitation.driver)
    except (SharedMemoryError, ValueError, RuntimeError) as error:
        # A container, or another user's process, for one.
        return str(error)
    return end
